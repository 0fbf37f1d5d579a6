-- Fast path of fixed_window.lua. decide.lua includes it, and says what a fast path does.
-- inputs
-- luacheck: read globals cost expiry_shift from is_single keys limit now option pack server_time
-- luacheck: read globals spends times to total try unpack_struct window
-- outputs
-- luacheck: globals replied reply slow

-- The windows of this run start here, unless the clock has stepped back.
local begins, expires = now - now % window, nil
include('calendar.fast.lua')
for i = from, to do
  local key = keys[i]
  local text = try('GET', key)
  local units, start, is_new = 0, begins, true
  if text then
    local tag, stored_units, stored_start, stored_window
    if #text == 25 then
      tag, stored_units, stored_start, stored_window = unpack_struct('<Bddd', text)
    end
    -- Neither a fraction nor NaN.
    if tag ~= 119 or not (stored_units >= 0 and stored_start <= now
      and stored_units % 1 + stored_start % 1 == 0) then
      slow = i
      break
    end
    if stored_window ~= window then slow = i break end
    if stored_start + window > now then
      units, start, is_new = stored_units, stored_start, false
    end
  end
  local remaining, left = limit - units, start + window - now
  if remaining < 0 then remaining = 0 end
  if total <= remaining then
    if spends then
      include('hold.record.lua') if slow then break end
      if is_new then
        if not expires then
          expires = math.floor((begins + window + expiry_shift) / 1000) + 1
          if from < to then expires = string.format('%.0f', expires) end
        end
        local state = pack('<Bddd', 119, total, start, window)
        if try('SET', key, state, 'PXAT', expires).err then slow = i break end
      elseif try('SETRANGE', key, '1', pack('<d', units + total)) ~= 25 then
        slow = i
        break
      end
    end
    if is_single then return pack('<dddd', server_time, times, remaining, left) end
    replied = replied + 1
    reply[replied] = pack('<ddd', times, remaining, left)
  elseif cost > remaining then
    include('hold.denied.lua') if slow then break end
    local reset_after = units == 0 and 0 or left
    if is_single then
      return pack('<dddddd', server_time, 0, remaining, left, left, reset_after)
    end
    replied = replied + 1
    reply[replied] = pack('<ddddd', 0, remaining, left, left, reset_after)
  else
    slow = i
    break
  end
end
