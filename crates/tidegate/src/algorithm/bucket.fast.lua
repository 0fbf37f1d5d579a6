-- Fast path of bucket.lua. decide.lua includes it, and says what a fast path does.
-- inputs
-- luacheck: read globals cost expiry_shift from is_single keys limit now option pack server_time
-- luacheck: read globals spends times to total try unpack_struct window
-- outputs
-- luacheck: globals replied reply slow

-- The remainder of an exact division costs less here than math.floor.
local expires_of, expires = nil, nil
for i = from, to do
  local key = keys[i]
  local text = try('GET', key)
  local level, part, lives_until = 0, 0, 0
  if text then
    local tag, stored_time, stored_window
    if #text == 41 then
      tag, level, part, stored_time, lives_until, stored_window = unpack_struct('<Bddddd', text)
    end
    if tag ~= 98 or stored_window ~= window
      or not (level >= 0 and level <= option and part >= 0 and part < window
        and stored_time <= now and level % 1 + part % 1 + stored_time % 1 == 0) then
      slow = i
      break
    end
    local parts = (now - stored_time) * limit
    if parts >= 4503599627370496 then slow = i break end
    local rest = parts % window
    local units = (parts - rest) / window
    if part < rest then part, units = part + window, units + 1 end
    if level < units then level, part = 0, 0 else level, part = level - units, part - rest end
  end
  local remaining = option - level
  if part > 0 and remaining > 0 then remaining = remaining - 1 end
  if total <= remaining then
    if spends then
      include('hold.record.lua') if slow then break end
      -- Drained then, rounded up.
      local drained_at = now + ((level + total) * window + part) / limit + 1
      if lives_until >= drained_at then
        if try('SETRANGE', key, '1', pack('<ddd', level + total, part, now)) ~= 41 then
          slow = i
          break
        end
      else
        local slack = option * window / limit / 16
        if level + part > 0 and slack < 2 * window / limit then slack = 2 * window / limit end
        slack = math.floor(slack) + 1
        lives_until = (math.floor(drained_at / slack) + 2) * slack
        if lives_until ~= expires_of then
          expires_of, expires = lives_until, math.floor((lives_until + expiry_shift) / 1000) + 1
          if from < to then expires = string.format('%.0f', expires) end
        end
        local state = pack('<Bddddd', 98, level + total, part, now, lives_until, window)
        if try('SET', key, state, 'PXAT', expires).err then slow = i break end
      end
    end
    if is_single then return pack('<ddddd', server_time, times, remaining, level, part) end
    replied = replied + 1
    reply[replied] = pack('<dddd', times, remaining, level, part)
  elseif cost > remaining then
    include('hold.denied.lua') if slow then break end
    -- drain_time of the units that are too many, and of all: divided and rounded up.
    local retry_after, reset_after = (level + cost - option) * window + part, level * window + part
    if reset_after >= 4503599627370496 or retry_after >= 4503599627370496 then slow = i break end
    retry_after = (retry_after + -retry_after % limit) / limit
    reset_after = (reset_after + -reset_after % limit) / limit
    if lives_until < now + reset_after then slow = i break end
    if is_single then
      return pack('<ddddddd', server_time, 0, remaining, level, part, retry_after, reset_after)
    end
    replied = replied + 1
    reply[replied] = pack('<dddddd', 0, remaining, level, part, retry_after, reset_after)
  else
    slow = i
    break
  end
end
