-- sliding-counter, the twin of sliding_counter.rs: admits a request if cur + floor(prev * (W - e) /
-- W) + c <= L, where windows are aligned to the Unix epoch and e is the elapsed time of the current
-- window.
--
-- Redis: a hash of the two window counts and the start of the current window. It expires when the
-- next window ends. The field `kind` distinguishes it from the hash of a bucket, in case the
-- algorithm of a policy changes.
--   HGETALL rate_limit:{user123}:per-user
--   ->   kind counter, start 1700000000000000, current 7, previous 93

-- Returns the elapsed time of a window at which at most `room` of the `previous` units still count.
local function elapsed_until(previous, room, window)
  if previous <= room then return 0 end
  return window - (mul_div_ceil(room + 1, window, previous) - 1)
end

algorithms['sliding-counter'] = {
  alt_suffix = 'counter',

  load = function(key, quota)
    local window = quota.window
    local state = {start = now - now % window, current = 0, previous = 0}
    local stored = read('HMGET', key, 'kind', 'start', 'current', 'previous')
    if not stored then
      state.other_type = true
    elseif stored[1] ~= 'counter' then
      state.other_type, state.absent = stored[1], not stored[1]
    else
      local start, current = tonumber(stored[2]), tonumber(stored[3])
      if start + window > now then
        state.stepped_back = start > now
        state.start, state.current = math.min(start, now), current
        state.previous = tonumber(stored[4])
      elseif start + 2 * window > now and current > 0 then
        state.start, state.previous = start + window, current
      end
    end
    state.elapsed = now - state.start
    return state
  end,

  remaining = function(state, quota)
    local carried_over = mul_div_rem(state.previous, quota.window - state.elapsed, quota.window)
    return math.max(0, quota.limit - state.current - carried_over)
  end,

  level = function(state)
    return state.current
  end,

  overdrawn = function(state, quota)
    local carried_over = mul_div_rem(state.previous, quota.window - state.elapsed, quota.window)
    return state.current + carried_over > quota.limit
  end,

  retry_after = function(state, quota, cost)
    local room = quota.limit - state.current - cost
    if room >= 0 then
      return elapsed_until(state.previous, room, quota.window) - state.elapsed
    end
    -- In the next window, the units of the current one become the previous ones.
    local next_elapsed = elapsed_until(state.current, quota.limit - cost, quota.window)
    return quota.window - state.elapsed + next_elapsed
  end,

  reset_after = function(state, quota, extra)
    local current = state.current + extra
    if current == 0 then
      return math.max(0, elapsed_until(state.previous, 0, quota.window) - state.elapsed)
    end
    return quota.window - state.elapsed + elapsed_until(current, 0, quota.window)
  end,

  counts_until = function(state, quota)
    return state.start + 2 * quota.window
  end,

  -- The count of the current window, and its elapsed time.
  snapshot = function(state, quota, reply, reply_len)
    reply[reply_len + 1], reply[reply_len + 2] = state.current, state.elapsed
    return reply_len + 2
  end,

  spend = function(state, quota, cost)
    state.current = state.current + cost
  end,

  refund = function(key, state, quota, cost, since)
    if since == 0 then
      local from_previous = math.min(cost, state.previous)
      state.previous = state.previous - from_previous
      state.current = math.max(0, state.current - (cost - from_previous))
    elseif since >= state.start then
      state.current = math.max(0, state.current - cost)
    elseif since + quota.window >= state.start then
      state.previous = math.max(0, state.previous - cost)
    end
  end,

  is_empty = function(state)
    return state.current == 0 and state.previous == 0
  end,

  save = function(key, state, quota)
    call('HSET', key, 'kind', 'counter', 'start', state.start, 'current', state.current,
      'previous', state.previous)
    call('PEXPIREAT', key, expiry(state.start + 2 * quota.window))
  end,
}
