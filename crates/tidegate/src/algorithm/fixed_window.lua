-- fixed-window, the twin of fixed_window.rs: admits a request if the count of the current window
-- plus the cost is at most L.
--
-- Redis: a string "<count>:<start of the window in microseconds>" that expires when the window
-- ends. The start is stored because an expiry has only milliseconds, and because a window starts at
-- the step if the clock steps back.
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

  -- The time until the window ends.
  snapshot = function(state, quota, reply, reply_len)
    reply[reply_len + 1] = state.start + quota.window - now
    return reply_len + 1
  end,

  spend = function(state, quota, cost)
    state.count = state.count + cost
  end,

  -- Returns the units, unless the charge was made in an earlier window.
  refund = function(key, state, quota, cost, since)
    if since == 0 or since >= state.start then state.count = math.max(0, state.count - cost) end
  end,

  is_empty = function(state)
    return state.count == 0
  end,

  save = function(key, state, quota)
    if quota.start ~= state.start then
      -- Formatting a number costs as much as a small command, so do it once for all windows with
      -- this start.
      quota.start, quota.suffix = state.start, ':' .. whole(state.start)
      quota.expires = whole(expiry(state.start + quota.window))
    end
    call('SET', key, whole(state.count) .. quota.suffix, 'PXAT', quota.expires)
  end,
}
