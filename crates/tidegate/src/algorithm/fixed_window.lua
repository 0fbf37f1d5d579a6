-- fixed-window, the twin of fixed_window.rs: admits a request if the count of the current window
-- plus the cost is at most L.
--
-- Redis: a string of "w" and three doubles: the count, the start of the window in microseconds, and
-- the window. It expires when the window ends. The start is stored because an expiry has only
-- milliseconds, and because a window starts at the step if the clock steps back; the window is
-- stored because a write keeps the expiry unless it was changed. A further request overwrites the
-- count in place (SETRANGE), which costs two thirds of a SET.
--   GET rate_limit:{user123}:per-user
--   ->   "w", 7, 1700000000000000, 60000000

-- The windows of this run start here, unless the clock has stepped back.
local begins, expires = now - now % window, nil
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
      rare = i
      break
    end
    if stored_start + window > now then
      if stored_window ~= window then rare = i break end
      units, start, is_new = stored_units, stored_start, false
    end
  end
  local remaining, left = limit - units, start + window - now
  if remaining < 0 then remaining = 0 end
  if total <= remaining then
    if spends then
      if is_new then
        if not expires then
          expires = math.floor((begins + window + expiry_shift) / 1000) + 1
          if from < to then expires = string.format('%.0f', expires) end
        end
        local state = pack('<Bddd', 119, total, start, window)
        if try('SET', key, state, 'PXAT', expires).err then rare = i break end
      elseif try('SETRANGE', key, '1', pack('<d', units + total)) ~= 25 then
        rare = i
        break
      end
    end
    if is_single then return pack('<dddd', server_time, times, remaining, left) end
    replied = replied + 1
    reply[replied] = pack('<ddd', times, remaining, left)
  elseif cost > remaining then
    local reset_after = units == 0 and 0 or left
    if is_single then
      return pack('<dddddd', server_time, 0, remaining, left, left, reset_after)
    end
    replied = replied + 1
    reply[replied] = pack('<ddddd', 0, remaining, left, left, reset_after)
  else
    rare = i
    break
  end
end

--------------------------------- general ---------------------------------

algorithms[5] = {
  load = function(key, quota)
    local state = {start = now - now % quota.window, count = 0}
    local value = read('GET', key)
    state.is_foreign = value ~= false
    if value and #value == 25 then
      local tag, count, start, window = unpack_struct('<Bddd', value)
      if tag == 119 and is_count(count) and is_time(start) then
        state.is_stale, state.is_foreign = window ~= quota.window, false
        if start + quota.window > now then
          state.stepped_back = start > now
          state.start, state.count = math.min(start, now), count
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
  snapshot = function(state, quota)
    return state.start + quota.window - now
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

  save = function(key, state, quota)
    call('SET', key, pack('<Bddd', 119, state.count, state.start, quota.window),
      'PXAT', expiry(state.start + quota.window))
  end,
}
