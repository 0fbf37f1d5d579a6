-- Picks the current period of a calendar quota: a fixed-window that has an option. Its option is
-- the start of the first of two periods, and its window the lengths of both in seconds, as one
-- number: first + second * 2^25. The server's clock picks, whatever those of the instances say.
-- decide.lua and general.lua include this file in calls with such quotas.
-- inputs
-- luacheck: read globals now
-- outputs: option and window, the start and the length of the period in microseconds
-- luacheck: globals kind option window
-- luacheck: no unused

if kind == 5 and option > 0 then
  local lengths, first = window, window % 33554432
  window = first * 1000000
  if now >= option + window then
    option, window = option + window, (lengths - first) / 33554432 * 1000000
  end
  -- The instance's clock is wrong by half a period or more: no algorithm has this kind.
  if now < option or now >= option + window then kind = -5 end
end
