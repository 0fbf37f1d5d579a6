-- Starts the window of a calendar quota with its period: see calendar.lua. fixed_window.fast.lua
-- includes this file in calls with such quotas.
-- inputs
-- luacheck: read globals option
-- outputs
-- luacheck: globals begins

if option > 0 then begins = option end
