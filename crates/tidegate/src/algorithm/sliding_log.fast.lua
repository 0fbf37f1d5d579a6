-- Fast path of sliding_log.lua. decide.lua includes it, and says what a fast path does.
-- inputs
-- luacheck: read globals clock cost expiry_shift from header is_single keys limit now pack
-- luacheck: read globals server_time spends time times to total try window
-- outputs
-- luacheck: globals removals replied reply slow

local call, sub = redis.call, string.sub
local MEMBER = '^%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d:%d%d%d%d%d%d%d:%w+'
local eighth, edge = (window - window % 8) / 8, now - window
local after_now, after_edge, eighth_start = now + 1, edge + 1, now - now % eighth
-- To print a number costs as much as a small command, and to read one a fifth of that. So the times
-- of many members are compared as text: the 16 digits decide, whatever follows, in any locale.
local is_text = to - from >= 8
if is_text then
  after_now, after_edge = string.format('%016.0f', after_now), string.format('%016.0f', after_edge)
  eighth_start = string.format('%016.0f', eighth_start)
end
-- The header continues with the window as text.
local suffix = ':' .. sub(header, 81)
local now_text, edge_text, next_digits, expires, full_suffix, digits_from
for i = from, to do
  local key = keys[i]
  local newest = try('ZRANGE', key, '-1', '-1')
  if newest.err then slow = i break end
  newest = newest[1]
  -- units: units in the window; first: the oldest member in it; gone: members that have left it;
  -- is_current: whether the newest was written under this window (and costs 1); is_old: whether it
  -- was written before this eighth.
  local units, first, gone, is_current, is_old = 0, nil, 0, false, true
  local newest_time, first_time
  if newest then
    local tail, is_full = sub(newest, 25), false
    is_current = tail == suffix
    if not is_current then
      full_suffix = full_suffix or suffix .. string.format('|%.0f|', limit)
      is_full = sub(tail, 1, #full_suffix) == full_suffix
      is_current = is_full
      if not (is_full or string.find(newest, MEMBER)) then slow = i break end
    end
    if is_full or not is_text then newest_time = sub(newest, 1, 16) + 0 end
    local newest_at = is_text and newest or newest_time
    if newest_at >= after_now then slow = i break end
    is_old = newest_at < eighth_start
    if is_full then
      local digits = sub(tail, #full_suffix + 1)
      local modulus = #digits == 8 and 100000000 or 10 ^ #digits
      first_time = newest_time - (newest_time - digits) % modulus
    end
    if is_full and first_time > edge then
      units = limit
    elseif newest_at >= after_edge then
      -- The oldest member of all is mostly the oldest in the window, or the next one is.
      local rank = '0'
      units = nil
      while not units do
        first = call('ZRANGE', key, rank, rank)[1]
        local own = 1
        tail = sub(first or '', 25)
        if tail ~= suffix and not (full_suffix and sub(tail, 1, #full_suffix) == full_suffix) then
          if not string.find(first or '', MEMBER) then slow = i break end
          own = tonumber(string.match(tail, '^:%w+:(%d+)$')) or 1
        end
        first_time = not is_text and sub(first, 1, 16) + 0
        if (first_time or first) >= after_edge then
          units = (sub(newest, 18, 24) - sub(first, 18, 24) + own) % 9000000
          if units % 1 ~= 0 then slow = i break end
        elseif gone == 0 then
          gone, rank = 1, '1'
        else
          edge_text = edge_text or string.format('%.0f', edge)
          gone = rank == '1' and call('ZCOUNT', key, '-inf', edge_text) or 0
          if gone < 2 then slow = i break end
          rank = string.format('%.0f', gone)
        end
      end
      if slow then break end
    else
      gone = -1 -- all of them
    end
  end
  local remaining = limit - units
  if remaining < 0 then remaining = 0 end
  if total <= remaining then
    if spends then
      if not now_text then
        now_text = time == 0 and clock[1] .. sub('00000' .. clock[2], -6)
          or string.format('%016.0f', now)
      end
      include('hold.record.lua') if slow then break end
      if gone < 0 then
        try('UNLINK', key)
        newest, is_old = nil, true
      end
      -- Nine times in ten only the last digit of the total changes, and need not be printed.
      local digit, member = newest and total == 1 and string.byte(newest, 24)
      if digit and digit < 57 then
        next_digits = next_digits or {'1', '2', '3', '4', '5', '6', '7', '8', '9'}
        member = now_text .. sub(newest, 17, 23) .. next_digits[digit - 47] .. suffix
      else
        local last_total = (newest and sub(newest, 18, 24) or 1000000) + total
        if last_total > 9999999 then slow = i break end
        member = now_text .. string.format(':%.0f', last_total) .. suffix
        if total ~= 1 then member = member .. string.format(':%.0f', total) end
      end
      if total == 1 and remaining == 1 and (first or units == 0) then
        if not digits_from then
          digits_from = 9
          local modulus = 100000000
          while modulus <= window do digits_from, modulus = digits_from - 1, modulus * 10 end
        end
        member = member .. string.format('|%.0f|', limit) .. sub(first or now_text, digits_from, 16)
      end
      if try('ZADD', key, now_text, member) ~= 1 then slow = i break end
      if gone == 1 then
        call('ZREMRANGEBYRANK', key, '0', '0')
      elseif gone > 1 then
        if gone > removals then gone = removals > 4 and removals or 4 end
        removals = removals - gone
        call('ZREMRANGEBYRANK', key, '0', gone - 1)
      end
      if is_old or not is_current then
        if not expires then
          expires = now - now % eighth + eighth + window + expiry_shift
          expires = math.floor(expires / 1000) + 1
          if from < to then expires = string.format('%.0f', expires) end
        end
        if try('PEXPIREAT', key, expires) ~= 1 then slow = i break end
      end
    end
    if is_single then return pack('<ddd', server_time, times, remaining) end
    replied = replied + 1
    reply[replied] = pack('<dd', times, remaining)
  elseif cost > remaining and is_current and units > 0 and units + cost - limit <= 1 then
    include('hold.denied.lua') if slow then break end
    -- The first member leaves room. Otherwise sliding_log.lua searches for the one that does.
    local retry_after = (first_time or sub(first, 1, 16)) + window - now
    local reset_after = (newest_time or sub(newest, 1, 16)) + window - now
    if not (retry_after > 0 and retry_after % 1 == 0 and reset_after >= retry_after
      and reset_after <= window) then
      slow = i
      break
    end
    if is_single then
      return pack('<ddddd', server_time, 0, remaining, retry_after, reset_after)
    end
    replied = replied + 1
    reply[replied] = pack('<dddd', 0, remaining, retry_after, reset_after)
  else
    slow = i
    break
  end
end
