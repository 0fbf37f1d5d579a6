-- sliding-counter, the twin of sliding_counter.rs: admits a request if cur + floor(prev * (W - e) /
-- W) + c <= L, where windows are aligned to the Unix epoch and e is the elapsed time of the current
-- window.
--
-- Redis: the current window, which is its start in microseconds and its length, its count, and the
-- count of the previous window; as a hash, or packed as a string of "c" and four doubles: start,
-- count, count of the previous window, length. It expires when the next window ends. The length is
-- stored because a write keeps the expiry unless it was changed.
--   HGETALL rate_limit:{user123}:per-user
--   ->   window 1700000000000000+60s, current 7, previous 93
--
-- general.lua includes this file, and says what its functions do.
-- inputs
-- luacheck: read globals as_text call expiry is_count is_time mul_div_ceil mul_div_rem now pack
-- luacheck: read globals read unpack_struct
-- outputs
-- luacheck: globals algorithms

-- Returns the elapsed time of a window at which at most `room` of the `previous` units still count.
local function elapsed_until(previous, room, window)
  if previous <= room then return 0 end
  return window - (mul_div_ceil(room + 1, window, previous) - 1)
end

local function carried_over(state, window)
  return (mul_div_rem(state.previous, window - state.elapsed, window))
end

-- Creates the functions for one of the two encodings.
local function sliding_counter(read_numbers, write_numbers)
  return {
    load = function(key, quota)
      local window = quota.window
      local state = {start = now - now % window, current = 0, previous = 0}
      local start, current, previous, stored_window = read_numbers(key, state)
      if is_time(start) and is_count(current) and is_count(previous) then
        state.is_foreign = false
        state.is_stale = stored_window ~= window and stored_window ~= as_text(window)
        if start + window > now then
          state.stepped_back = start > now and start
          state.start, state.current = math.min(start, now), current
          state.previous = previous
        elseif start + 2 * window > now and current > 0 then
          state.start, state.previous = start + window, current
        end
      end
      state.elapsed = now - state.start
      return state
    end,

    remaining = function(state, quota)
      return math.max(0, quota.limit - state.current - carried_over(state, quota.window))
    end,

    level = function(state)
      return state.current
    end,

    overdrawn = function(state, quota)
      return state.current + carried_over(state, quota.window) > quota.limit
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
    snapshot = function(state)
      return state.current, state.elapsed
    end,

    spend = function(state, quota, cost)
      state.current = state.current + cost
    end,

    refund = function(state, quota, cost, since)
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
      local expires = expiry(state.start + 2 * quota.window)
      write_numbers(key, expires, state.start, state.current, state.previous, quota.window)
    end,
  }
end

algorithms[3] = sliding_counter(function(key, state)
  local fields = read('HMGET', key, 'window', 'current', 'previous')
  state.is_foreign = not fields or fields[1] ~= false
  if not fields then return nil end
  local start, window = string.match(fields[1] or '', '^(%d+)%+(%w+)$')
  return tonumber(start), tonumber(fields[2]), tonumber(fields[3]), window
end, function(key, expires, start, current, previous, window)
  call('HSET', key, 'window', string.format('%016.0f+', start) .. as_text(window),
    'current', current, 'previous', previous)
  call('PEXPIREAT', key, expires)
end)

algorithms[4] = sliding_counter(function(key, state)
  local text = read('GET', key)
  state.is_foreign = text ~= false
  if not text or #text ~= 33 then return nil end
  local tag, start, current, previous, window = unpack_struct('<Bdddd', text)
  if tag == 99 then return start, current, previous, window end
end, function(key, expires, ...)
  call('SET', key, pack('<Bdddd', 99, ...), 'PXAT', expires)
end)
