-- fixed-window, the twin of fixed_window.rs: admits when the count in the window of the clock, plus the cost, is at most L.
--
-- Redis: a string "<count>:<start of the window in microseconds>" that expires at the window's end. The start is there
-- because an expiry has only milliseconds, and because a clock may step back: then a window begins at the step.
--   GET rate_limit:{user123}:per-user   ->   "7:1700000000000000"

algorithms['fixed-window'] = {
  alt_suffix = 'window',

  load = function(key, quota)
    local state = {start = now - now % quota.window, count = 0}
    local value = read('GET', key)
    local count, start = string.match(value or '', '^(%d+):(%d+)$')
    start = tonumber(start)
    state.absent = value == false
    state.other_type = not state.absent and not start
    if start and start + quota.window > now then
      state.stepped_back = start > now
      state.start, state.count = math.min(start, now), tonumber(count)
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

  retry_after = function(state, quota)
    return state.start + quota.window - now
  end,

  reset_after = function(state, quota, extra)
    return state.count + extra == 0 and 0 or state.start + quota.window - now
  end,

  counts_until = function(state, quota)
    return state.start + quota.window
  end,

  -- How long the window lasts yet.
  snapshot = function(state, quota, reply, replied)
    reply[replied + 1] = state.start + quota.window - now
    return replied + 1
  end,

  spend = function(state, quota, cost)
    state.count = state.count + cost
  end,

  -- A charge of an earlier window has nothing left to return.
  refund = function(key, state, quota, cost, since)
    if since == 0 or since >= state.start then state.count = math.max(0, state.count - cost) end
  end,

  is_empty = function(state)
    return state.count == 0
  end,

  save = function(key, state, quota)
    if quota.start ~= state.start then
      -- The same for all windows that began then. To write a number down costs as much as a small command.
      quota.start, quota.suffix = state.start, ':' .. whole(state.start)
      quota.expires = whole(expiry(state.start + quota.window))
    end
    call('SET', key, whole(state.count) .. quota.suffix, 'PXAT', quota.expires)
  end,
}
