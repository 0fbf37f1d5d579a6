-- Fast path of sliding_counter.lua, in both encodings. decide.lua includes it, and says what a fast
-- path does.
-- inputs
-- luacheck: read globals cost expiry_shift from header is_single keys kind limit now pack
-- luacheck: read globals server_time spends times to total try unpack_struct window
-- outputs
-- luacheck: globals replied reply slow

local is_hash, begins, expires, total_text = kind == 3, now - now % window, nil, nil
local sub = string.sub
-- The header of a hash continues with the length as text. `known`: a field `window` of this length
-- that was read before, and its start: mostly it is the same for all keys.
local suffix, known, known_start = nil, nil, nil
if is_hash then suffix = '+' .. sub(header, 81) end
for i = from, to do
  local key = keys[i]
  local start, current, previous, is_new = begins, 0, 0, true
  local found, stored_start, stored_current, stored_previous, stored_window
  if is_hash then
    local fields = try('HMGET', key, 'window', 'current', 'previous')
    found = fields[1] or fields.err
    if found then
      if found ~= known then
        if sub(found, 17) ~= suffix then slow = i break end
        known, known_start = found, sub(found, 1, 16) + 0
      end
      stored_start, stored_window = known_start, window
      stored_current, stored_previous = (fields[2] or -1) + 0, fields[3] or -1
    end
  else
    found = try('GET', key)
    if found then
      local tag
      if #found == 33 then
        tag, stored_start, stored_current, stored_previous, stored_window =
          unpack_struct('<Bdddd', found)
      end
      if tag ~= 99 then slow = i break end
    end
  end
  if found then
    -- Neither a fraction, nor NaN, nor too large for a reply.
    if not (stored_start <= now and stored_current >= 0 and stored_current <= 1e13
      and stored_start % 1 + stored_current % 1 == 0) then
      slow = i
      break
    end
    if stored_start + window > now then
      if stored_window ~= window then slow = i break end
      start, current, previous, is_new = stored_start, stored_current, stored_previous, false
    elseif stored_start + 2 * window > now and stored_current > 0 then
      start, previous = stored_start + window, stored_current
    end
  end
  local elapsed, remaining = now - start, limit - current
  if remaining > 0 then
    previous = previous + 0 -- a text in a hash, which is converted only here
    local product = previous * (window - elapsed)
    if not (previous >= 0 and previous % 1 == 0 and product < 4503599627370496) then
      slow = i
      break
    end
    remaining = remaining - (product - product % window) / window
  end
  if remaining < 0 then remaining = 0 end
  if total <= remaining then
    if spends then
      include('hold.record.lua') if slow then break end
      if is_new then
        local expires_at = start == begins and expires
        if not expires_at then
          expires_at = math.floor((start + 2 * window + expiry_shift) / 1000) + 1
          if from < to then expires_at = string.format('%.0f', expires_at) end
          if start == begins then expires = expires_at end
        end
        local done
        if is_hash then
          done = try('HSET', key, 'window', string.format('%016.0f', start) .. suffix,
            'current', total, 'previous', previous)
          if type(done) == 'number' then done = try('PEXPIREAT', key, expires_at) end
        else
          done = try('SET', key, pack('<Bdddd', 99, start, total, previous, window),
            'PXAT', expires_at)
        end
        if type(done) == 'table' and done.err then slow = i break end
      elseif is_hash then
        total_text = total_text or total == 1 and '1' or string.format('%.0f', total)
        if try('HINCRBY', key, 'current', total_text) ~= current + total then slow = i break end
      elseif try('SETRANGE', key, '9', pack('<d', current + total)) ~= 33 then
        -- In place, this costs two thirds of a SET.
        slow = i
        break
      end
    end
    if is_single then return pack('<ddddd', server_time, times, remaining, current, elapsed) end
    replied = replied + 1
    reply[replied] = pack('<dddd', times, remaining, current, elapsed)
  elseif cost > remaining and stored_window == window then
    include('hold.denied.lua') if slow then break end
    -- retry_after: until at most `room` of the units of the previous window count. If there is no
    -- room, that is in the next window, in which the units of the current one are the previous.
    local units, room, retry_after = previous, limit - current - cost, -elapsed
    if room < 0 then units, room, retry_after = current, limit - cost, window - elapsed end
    local product = (room + 1) * window
    if product >= 4503599627370496 then slow = i break end
    -- The quotient is rounded up.
    if units > room then
      retry_after = retry_after + window + 1 - (product + -product % units) / units
    end
    -- reset_after: until none of the units counts.
    local reset_after = window - elapsed
    units = current
    if units == 0 then units, reset_after = previous, -elapsed end
    if units > 0 then
      reset_after = reset_after + window + 1 - (window + -window % units) / units
    end
    if reset_after < 0 then reset_after = 0 end
    if is_single then
      return pack('<ddddddd', server_time, 0, remaining, current, elapsed, retry_after, reset_after)
    end
    replied = replied + 1
    reply[replied] = pack('<dddddd', 0, remaining, current, elapsed, retry_after, reset_after)
  else
    slow = i
    break
  end
end
