-- Fast path of hold.lua, for a group of one charge whose hold the client has found usual: times is
-- 1. Decides one unit in flight, whose id has neither an asterisk nor a colon: its acquire for the
-- usual time, its release and its renewal. Lets the fast path of an algorithm decide a reservation,
-- for which hold.record.lua writes the record; hold.after.lua ends both. Anything else is left to
-- hold.lua. decide.lua includes this file.
-- inputs
-- luacheck: read globals expiry_shift is_single keys now pack run server_time try unpack_struct
-- outputs
-- luacheck: globals argv cost from held_header held_to kind level limit mode option part recorded
-- luacheck: globals removals replied reply times to ttl window
-- luacheck: no unused

-- `level` and `part` are those of a bucket, in its own file.
local held_to, level, part = to, 0, 0
local held_header, mode, ttl, recorded = nil, nil, nil, nil
if kind == 0 and times == 1 then
  local action, max_ttl, default_ttl = limit
  held_header, to = argv[run], from
  kind, limit, window, option, cost, level, part, mode, ttl, max_ttl, default_ttl =
    unpack_struct('<ddddddddddd', held_header, 81)
  level, part = 0, 0
  if kind == 1 or kind == 3 then
    -- The window as text is where the header of a run has it.
    argv[run] = string.sub(held_header, 105)
  elseif kind == 8 then
    local key, record_key = keys[from], keys[from + 1]
    local id, new_end = string.sub(record_key, #key + 4), now + ttl
    local last = try('ZRANGE', key, '-1', '-1', 'WITHSCORES')
    local last_end, count, allowed, wait = nil, nil, nil, 0
    -- Not another type, not units other than 1, and the clock has not stepped back.
    if not last.err and last[1] ~= '*' then
      last_end, count = (last[2] or now) + 0, last[1] and try('ZCARD', key) or 0
      if action == 1 and count >= limit then
        -- Full, unless the hold has ended that would make room.
        local rank = count == limit and '0' or string.format('%d', count - limit)
        wait = try('ZRANGE', key, rank, rank, 'WITHSCORES')[2] - now
      end
      if wait <= 0 and count > 0 then
        -- An integer is printed faster than a double, and both have all digits.
        local now_text = string.format('%d', now)
        if count > removals and try('ZCOUNT', key, '-inf', now_text) > removals then
          last_end = nil
        else
          local ended = try('ZREMRANGEBYSCORE', key, '-inf', now_text)
          removals, count, wait = removals - ended, count - ended, 0
          -- All have ended, and with them the expiry of the set.
          if count == 0 then last, last_end = {}, now end
        end
      end
      if last_end and last_end > now + max_ttl then last_end = nil end
    end
    local remaining, status, ends = 0, 0, nil
    if last_end and wait > 0 then
      if not try('ZSCORE', key, id) then allowed = 0 end
    elseif last_end and action == 1 then
      if count < 10000 and try('ZADD', key, 'NX', string.format('%d', new_end), id) == 1 then
        allowed, remaining, status, ends = 1, limit - count - 1, 1, new_end
      end
    elseif last_end then
      ends = try('ZSCORE', key, id)
      ends = ends and ends + 0
      local record = ends and action == 9 and try('GET', record_key)
      local charged_at = ends and ends - default_ttl
      local tag, held_units, charged, record_end, _
      if record and #record == 50 then
        tag, _, held_units, charged, _, record_end = unpack_struct('<BBdddd', record)
      end
      if not ends
        or record and (tag ~= 104 or held_units ~= 1 or charged % 1 ~= 0 or charged > now) then
        ends = nil
      elseif action == 8 then
        if try('ZREM', key, id) == 1 then allowed, status, count = 1, 3, count - 1 end
        try('UNLINK', record_key)
        if last[1] == id then
          last_end = (try('ZRANGE', key, '-1', '-1', 'WITHSCORES')[2] or now) + 0
        end
        ends = nil
      else
        if record_end and record_end > now then charged_at = charged end
        ends = math.max(ends, math.min(new_end, charged_at + max_ttl))
        record = pack('<BBdddddd', 104, 0, 1, charged_at, now, ends, 0, charged_at)
        local is_held = try('ZADD', key, 'XX', string.format('%d', ends), id) == 0
          and not try('SET', record_key, record, 'PXAT',
            string.format('%d', math.floor((ends + 60000000 + expiry_shift) / 1000) + 1)).err
        if is_held then allowed, status = 1, 1 end
      end
      if allowed then remaining = math.max(0, limit - count) end
    end
    if allowed and ends then
      -- The expiry that concurrency.lua has.
      local lives_until = ends - ends % 60000000 + 120000000
      if not last[1] or lives_until > last_end - last_end % 60000000 + 120000000 then
        local expires_at = string.format('%d', math.floor((lives_until + expiry_shift) / 1000) + 1)
        if try('PEXPIREAT', key, expires_at) ~= 1 then
          -- hold.lua raises the error.
          if action == 1 then try('ZREM', key, id) end
          allowed = nil
        end
      end
      last_end = math.max(last_end, ends)
    end
    if allowed then
      local reset_after, rest = math.max(0, last_end - now), ends and ends - now or 0
      if is_single then
        return pack('<ddddddddd',
          server_time, 2, allowed, remaining, wait, reset_after, 0, status, rest)
      end
      replied = replied + 1
      reply[replied] =
        pack('<dddddddd', 2, allowed, remaining, wait, reset_after, 0, status, rest)
      -- No key is left for a fast path.
      kind, from = 5, to + 1
    else
      kind = 0
    end
  end
end
