-- fixed-window, the twin of fixed_window.rs: admits a request if the count of the current window
-- plus the cost is at most L.
--
-- Redis: a string of "w" and three doubles: the count, the start of the window in microseconds, and
-- the window. It expires when the window ends. The start is stored because an expiry has only
-- milliseconds, and because a window starts at the step if the clock steps back; the window is
-- stored because a write keeps the expiry unless it was changed. A further request overwrites the
-- count in place (SETRANGE), which costs two thirds of a SET. The window of a calendar quota is a
-- period, which starts at `option`; a count stays in force until the end of its own.
--   GET rate_limit:{user123}:per-user
--   ->   "w", 7, 1700000000000000, 60000000
--
-- general.lua includes this file, and says what its functions do.
-- inputs
-- luacheck: read globals call expiry is_count is_time now pack read unpack_struct
-- outputs
-- luacheck: globals algorithms

algorithms[5] = {
  load = function(key, quota)
    local is_calendar = quota.option > 0
    local start = is_calendar and quota.option or now - now % quota.window
    local state = {start = start, count = 0, window = quota.window}
    local value = read('GET', key)
    state.is_foreign = value ~= false
    if value and #value == 25 then
      local tag, count, start, window = unpack_struct('<Bddd', value)
      if tag == 119 and is_count(count) and is_time(start)
        and (is_time(window) or not is_calendar) then
        state.is_stale, state.is_foreign = window ~= quota.window, false
        if not is_calendar then window = quota.window end
        if start + window > now then
          state.stepped_back = start > now and start
          state.start, state.count, state.window = math.min(start, now), count, window
        end
      end
    end
    return state
  end,

  remaining = function(state, quota)
    return math.max(0, quota.limit - state.count)
  end,

  level = function(state)
    return state.count
  end,

  overdrawn = function(state, quota)
    return state.count > quota.limit
  end,

  retry_after = function(state)
    return state.start + state.window - now
  end,

  reset_after = function(state, _, extra)
    return state.count + extra == 0 and 0 or state.start + state.window - now
  end,

  counts_until = function(state)
    return state.start + state.window
  end,

  -- The time until the window ends.
  snapshot = function(state)
    return state.start + state.window - now
  end,

  spend = function(state, quota, cost)
    state.count = state.count + cost
  end,

  -- Returns the units, unless the charge was made in an earlier window.
  refund = function(state, quota, cost, since)
    if since == 0 or since >= state.start then state.count = math.max(0, state.count - cost) end
  end,

  is_empty = function(state)
    return state.count == 0
  end,

  save = function(key, state)
    call('SET', key, pack('<Bddd', 119, state.count, state.start, state.window),
      'PXAT', expiry(state.start + state.window))
  end,
}
