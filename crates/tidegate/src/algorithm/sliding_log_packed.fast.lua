-- Fast path of sliding_log_packed.lua. decide.lua includes it, and says what a fast path does.
-- inputs
-- luacheck: read globals cost expiry_shift from is_single keys limit now pack server_time spends
-- luacheck: read globals times to total try unpack_struct window
-- outputs
-- luacheck: globals replied reply slow

-- Times of this run are written with this width.
local width, time_format = 4, '<I4'
if window >= 4294967296 then
  width = window < 1099511627776 and 5 or 6
  time_format = width == 5 and '<I5' or '<I6'
end
-- "q" and the width as one number.
local mark, modulus, stamp, lives, expires = 113 + 256 * width, 256 ^ width, nil, nil, nil
for i = from, to do
  local key = keys[i]
  local text = try('GET', key)
  -- held: requests in the string; live: index of the oldest in the window.
  local held, live, oldest, newest, lives_until = 0, 0, 0, 0, 0
  if text then
    local stored_mark
    if #text > 18 then
      stored_mark, oldest, lives_until = unpack_struct('<Hdd', text)
      held = (#text - 18) / width
    end
    if stored_mark ~= mark or held % 1 > 0 then slow = i break end
    newest = unpack_struct(time_format, text, #text - width + 1)
    newest = oldest + (newest - oldest) % modulus
    if not (newest <= now and newest % 1 == 0) then slow = i break end
    -- A request is in the window if its age, relative to the newest, is less than this.
    local max_age = newest + window - now
    if max_age <= 0 then
      live = held
    elseif newest - oldest >= max_age then
      -- Few requests have left since the last write, so this is a galloping search.
      local last, high, step = held - 1, 1, 1
      live = 1
      while high < last and
        (newest - unpack_struct(time_format, text, 19 + high * width)) % modulus >= max_age do
        live, high, step = high + 1, high + step, step * 2
        if high > last then high = last end
      end
      while live < high do
        local middle = (live + high - (live + high) % 2) / 2
        local age = (newest - unpack_struct(time_format, text, 19 + middle * width)) % modulus
        if age < max_age then high = middle else live = middle + 1 end
      end
    end
  end
  local units = held - live
  local remaining = limit - units
  if remaining < 0 then remaining = 0 end
  if total <= remaining then
    if spends then
      -- A few units that are spent together are written as single requests.
      if total > 8 or 18 + (units + total) * width > 4096 then slow = i break end
      include('hold.record.lua') if slow then break end
      if not stamp then
        stamp = pack(time_format, now % modulus)
        if total > 1 then stamp = string.rep(stamp, total) end
      end
      local done
      if live == 0 and lives_until >= now + window then
        done = try('SET', key, text .. stamp, 'KEEPTTL')
      else
        local kept = text and string.sub(text, 19 + live * width) or ''
        if units == 0 then
          oldest = now
        elseif live > 0 then
          oldest = newest - (newest - unpack_struct(time_format, kept)) % modulus
        end
        if lives_until >= now + window then
          kept = pack('<Hdd', mark, oldest, lives_until) .. kept .. stamp
          done = try('SET', key, kept, 'KEEPTTL')
        else
          if not lives then
            lives = now + window + math.floor(window / 8)
            expires = math.floor((lives + expiry_shift) / 1000) + 1
            if from < to then expires = string.format('%.0f', expires) end
          end
          done = try('SET', key, pack('<Hdd', mark, oldest, lives) .. kept .. stamp,
            'PXAT', expires)
        end
      end
      if done.err then slow = i break end
    end
    if is_single then return pack('<ddd', server_time, times, remaining) end
    replied = replied + 1
    reply[replied] = pack('<dd', times, remaining)
  elseif cost > remaining and lives_until >= newest + window then
    include('hold.denied.lua') if slow then break end
    local must_leave, retry_after = units + cost - limit, window
    local reset_after = units == 0 and 0 or newest + window - now
    if must_leave <= units then
      local time = unpack_struct(time_format, text, 19 + (live + must_leave - 1) * width)
      retry_after = newest - (newest - time) % modulus + window - now
      if retry_after <= 0 then slow = i break end -- the times are not in order
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
