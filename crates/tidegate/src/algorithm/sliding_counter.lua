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

local is_hash, begins, expires, total_text = kind == 3, now - now % window, nil, nil
local sub = string.sub
-- The header of a hash continues with the length as text. `known`: a field `window` of this length
-- that was read before, and its start: mostly it is the same for all keys.
local suffix, known, known_start = nil, nil, nil
if is_hash then suffix = '+' .. sub(header, 81) end
for i = from, to do
  local key = keys[i]
  local start, current, previous, is_new, found = begins, 0, 0, true, nil
  local stored_start, stored_current, stored_previous, stored_window
  if is_hash then
    local fields = try('HMGET', key, 'window', 'current', 'previous')
    found = fields[1] or fields.err
    if found then
      if found ~= known then
        if sub(found, 17) ~= suffix then rare = i break end
        known, known_start = found, sub(found, 1, 16) + 0
      end
      stored_start, stored_window = known_start, window
      stored_current, stored_previous = (fields[2] or -1) + 0, fields[3] or -1
    end
  else
    found = try('GET', key)
    if found then
      local tag
      if #found == 33 then
        tag, stored_start, stored_current, stored_previous, stored_window =
          unpack_struct('<Bdddd', found)
      end
      if tag ~= 99 then rare = i break end
    end
  end
  if found then
    -- Neither a fraction, nor NaN, nor too large for a reply.
    if not (stored_start <= now and stored_current >= 0 and stored_current <= 1e13
      and stored_start % 1 + stored_current % 1 == 0) then
      rare = i
      break
    end
    if stored_start + window > now then
      if stored_window ~= window then rare = i break end
      start, current, previous, is_new = stored_start, stored_current, stored_previous, false
    elseif stored_start + 2 * window > now and stored_current > 0 then
      start, previous = stored_start + window, stored_current
    end
  end
  local elapsed, remaining = now - start, limit - current
  if remaining > 0 then
    previous = previous + 0 -- a text in a hash, which is converted only here
    local product = previous * (window - elapsed)
    if not (previous >= 0 and previous % 1 == 0 and product < 4503599627370496) then
      rare = i
      break
    end
    remaining = remaining - (product - product % window) / window
  end
  if remaining < 0 then remaining = 0 end
  if total <= remaining then
    if spends then
      if is_new then
        local expires_at = start == begins and expires
        if not expires_at then
          expires_at = math.floor((start + 2 * window + expiry_shift) / 1000) + 1
          if from < to then expires_at = string.format('%.0f', expires_at) end
          if start == begins then expires = expires_at end
        end
        local done
        if is_hash then
          done = try('HSET', key, 'window', string.format('%016.0f', start) .. suffix,
            'current', total, 'previous', previous)
          if type(done) == 'number' then done = try('PEXPIREAT', key, expires_at) end
        else
          done = try('SET', key, pack('<Bdddd', 99, start, total, previous, window),
            'PXAT', expires_at)
        end
        if type(done) == 'table' and done.err then rare = i break end
      elseif is_hash then
        total_text = total_text or total == 1 and '1' or string.format('%.0f', total)
        if try('HINCRBY', key, 'current', total_text) ~= current + total then rare = i break end
      elseif try('SETRANGE', key, '9', pack('<d', current + total)) ~= 33 then
        -- In place, this costs two thirds of a SET.
        rare = i
        break
      end
    end
    if is_single then return pack('<ddddd', server_time, times, remaining, current, elapsed) end
    replied = replied + 1
    reply[replied] = pack('<dddd', times, remaining, current, elapsed)
  elseif cost > remaining and stored_window == window then
    -- retry_after: until at most `room` of the units of the previous window count. If there is no
    -- room, that is in the next window, in which the units of the current one are the previous.
    local units, room, retry_after = previous, limit - current - cost, -elapsed
    if room < 0 then units, room, retry_after = current, limit - cost, window - elapsed end
    local product = (room + 1) * window
    if product >= 4503599627370496 then rare = i break end
    -- The quotient is rounded up.
    if units > room then
      retry_after = retry_after + window + 1 - (product + -product % units) / units
    end
    -- reset_after: until none of the units counts.
    local reset_after = window - elapsed
    units = current
    if units == 0 then units, reset_after = previous, -elapsed end
    if units > 0 then
      reset_after = reset_after + window + 1 - (window + -window % units) / units
    end
    if reset_after < 0 then reset_after = 0 end
    if is_single then
      return pack('<ddddddd', server_time, 0, remaining, current, elapsed, retry_after, reset_after)
    end
    replied = replied + 1
    reply[replied] = pack('<dddddd', 0, remaining, current, elapsed, retry_after, reset_after)
  else
    rare = i
    break
  end
end

--------------------------------- general ---------------------------------

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
          state.stepped_back = start > now
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
