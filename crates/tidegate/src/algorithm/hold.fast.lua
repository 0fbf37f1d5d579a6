-- Fast path of hold.lua, for a group of one charge with a hold. Decides one unit in flight, whose
-- hold has the usual time: its acquire, its release and its renewal. Lets the fast path of an
-- algorithm decide a reservation whose id has no record; hold.after.lua then writes the record.
-- Anything else is left to hold.lua. decide.lua includes this file.
-- inputs
-- luacheck: read globals expiry_shift keys now pack run runs server_time try unpack_struct
-- outputs
-- luacheck: globals all_argv argv cost from held_key held_mode held_ttl kind limit option removals
-- luacheck: globals replied reply times to window
-- luacheck: no unused

local all_argv, group, held_key, held_mode, held_ttl = argv, argv[run], nil, nil, nil
local action, charges, blocks, holds, charge_kind, max, length, extra, units, mode, ttl, max_ttl,
  default_ttl, has_record, has_set, _
if kind == 0 and #group >= 184 then
  action, charges, blocks, holds, _, charge_kind, max, length, extra, units, _, _, mode, ttl,
    max_ttl, default_ttl, has_record, has_set = unpack_struct('<dddddddddddddddddd', group, 41)
end
if holds == 1 and charges == 1 and blocks == 0 and has_record == 1 and has_set == 0 then
  local key, record_key = keys[from], keys[from + 1]
  if charge_kind == 8 then
    local id, new_end = string.sub(record_key, #key + 4), now + ttl
    -- An integer is printed faster than a double, and both have all digits.
    local now_text = string.format('%d', now)
    -- A search for each character takes a tenth of one for a pattern.
    local last = not string.find(id, '*', 1, true) and not string.find(id, ':', 1, true)
      and try('ZRANGE', key, '-1', '-1', 'WITHSCORES')
    local last_end, allowed = nil, nil
    -- Not another type, not units other than 1, and the clock has not stepped back.
    if last and not last.err and last[1] ~= '*' then
      last_end = (last[2] or now) + 0
      local ended = last[1] and try('ZCOUNT', key, '-inf', now_text) or 0
      if last_end > now + max_ttl or ended > removals then
        last_end = nil
      elseif ended > 0 then
        removals = removals - ended
        try('ZREMRANGEBYSCORE', key, '-inf', now_text)
        -- All have ended, and with them the expiry of the set.
        if last_end <= now then last = {} end
      end
    end
    local remaining, wait, status, ends = 0, 0, 0, nil
    if last_end and action == 1 and mode == 1 and units == 1 and ttl == default_ttl then
      local count = try('ZCARD', key)
      if count >= max then
        local freeing = not try('ZSCORE', key, id)
          and try('ZRANGE', key, count - max, count - max, 'WITHSCORES')
        if freeing then allowed, wait = 0, freeing[2] - now end
      elseif count < 10000 and try('ZADD', key, 'NX', string.format('%d', new_end), id) == 1 then
        allowed, remaining, status, ends = 1, max - count - 1, 1, new_end
      end
    elseif last_end and (action == 8 or action == 9) then
      ends = try('ZSCORE', key, id)
      ends = ends and ends + 0
      local record = ends and action == 9 and try('GET', record_key)
      local charged_at = ends and ends - default_ttl
      local tag, held_units, charged, record_end
      if record and #record == 42 then
        tag, _, held_units, charged, _, record_end = unpack_struct('<BBdddd', record)
      end
      if not ends or ends <= now
        or record and (tag ~= 104 or held_units ~= 1 or charged % 1 ~= 0 or charged > now) then
        ends = nil
      elseif action == 8 then
        try('ZREM', key, id)
        try('UNLINK', record_key)
        if last[1] == id then
          last_end = (try('ZRANGE', key, '-1', '-1', 'WITHSCORES')[2] or now) + 0
        end
        allowed, status, ends = 1, 3, nil
      else
        if record_end and record_end > now then charged_at = charged end
        ends = math.max(ends, math.min(new_end, charged_at + max_ttl))
        try('ZADD', key, 'XX', string.format('%d', ends), id)
        try('SET', record_key, pack('<BBddddd', 104, 0, 1, charged_at, now, ends, 0), 'PXAT',
          math.floor((ends + 60000000 + expiry_shift) / 1000) + 1)
        allowed, status = 1, 1
      end
      if allowed then remaining = math.max(0, max - try('ZCARD', key)) end
    end
    if allowed then
      if ends then
        -- The expiry that concurrency.lua has.
        local lives_until = ends - ends % 60000000 + 120000000
        if not last[1] or lives_until > last_end - last_end % 60000000 + 120000000 then
          try('PEXPIREAT', key, math.floor((lives_until + expiry_shift) / 1000) + 1)
        end
        last_end = math.max(last_end, ends)
      end
      local reset_after, rest = math.max(0, last_end - now), ends and ends - now or 0
      if runs == 1 then
        return pack('<dddddddd',
          server_time, allowed, remaining, wait, reset_after, 0, status, rest)
      end
      replied = replied + 1
      reply[replied] = pack('<ddddddd', allowed, remaining, wait, reset_after, 0, status, rest)
      -- No key is left for a fast path.
      kind, from, times = 5, to + 1, 0
      limit, window, option, cost = max, 1, 0, 1
    end
  elseif action == 1 and mode > 0 and (charge_kind > 2 or extra == 0)
    and (charge_kind < 6 or extra * length < 4503599627370496)
    and not try('GET', record_key) then
    held_key, held_mode, held_ttl = record_key, mode, ttl
    kind, limit, window, option, cost, times = charge_kind, max, length, extra, units, 1
    -- The window as text is where the header of a run has it.
    argv, to = {[run] = string.sub(group, 105)}, from
  end
end
