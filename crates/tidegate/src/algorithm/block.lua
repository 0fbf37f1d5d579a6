-- Blocks of a group, the twin of block.rs: a key that has exceeded a limit with `block_for` is
-- denied until the end of its block. Runs after the charges are loaded. Marks those that are
-- blocked as not fitting, and gives each charge a `block`: `rest` (time until its end; 0 if it has
-- ended), `length` (of the block that starts if the charge exceeds its limit), `is_changed` (the
-- clock stepped back), and what is written then.
--
-- Redis: a string of whole numbers, which are times in microseconds: start and end of the last
-- block, then the ends of the blocks before it that counted when it started, the newest first. It
-- expires when the block ends, or a day later if `block_for` is a list.
--   GET rate_limit:{user123}block:per-user
--   ->   "1700000000000000 1700000600000000 1699990000000000"
--
-- general.lua includes this file.
-- inputs
-- luacheck: read globals block_count count expiry from header hold_count is_time keys now read
-- luacheck: read globals unpack_struct whole
-- outputs
-- luacheck: globals all_fit charges

local HISTORY, MAX_LENGTH = 86400000000, 31622400000000
local position = 81 + 48 * count + 56 * hold_count
for i = 1, block_count do
  local at, steps = unpack_struct('<dd', header, position)
  local lengths = {unpack_struct('<' .. string.rep('d', steps), header, position + 16)}
  position = position + 16 + 8 * steps
  local charge, key, times = charges[at], keys[from + count + i - 1], {}
  -- A value that is not ours counts as none, and is overwritten.
  local value = read('GET', key)
  if value and string.find(value, '^%d+ %d[%d ]*$') then
    for number in string.gmatch(value, '%d+') do
      local time = tonumber(number)
      if is_time(time) then times[#times + 1] = time end
    end
  end
  local start, ends = times[1], times[2]
  local is_ours = ends and start <= ends and ends - start <= MAX_LENGTH
  local block = {key = key, rest = 0, is_changed = is_ours and start > now}
  if block.is_changed then
    start, ends = now, ends - (start - now)
    for j = 3, #times do times[j] = math.min(times[j], now) end
    times[2] = ends
  end
  -- Ends of the blocks that count for the length of the next one.
  local ended = {}
  for j = 2, is_ours and #times or 0 do
    if #ended < steps - 1 and times[j] + HISTORY > now then ended[#ended + 1] = whole(times[j]) end
  end
  if is_ours and ends > now then
    -- A repeated request was admitted before the block.
    local is_repeated = charge.hold and charge.hold.is_repeated
    if not is_repeated then block.rest, charge.fits, all_fit = ends - now, false, false end
    table.remove(ended, 1)
  else
    block.length = lengths[#ended + 1]
    start, ends = now, now + block.length
  end
  block.value = table.concat({whole(start), whole(ends), unpack(ended)}, ' ')
  block.expires_at = expiry(steps > 1 and ends + HISTORY or ends)
  charge.block = block
end
