-- token-bucket and leaky-bucket, the twin of bucket.rs: one level that drains at L/W; a cost c is
-- admitted if level + c <= B. In a token bucket the level is the number of missing tokens. In a
-- leaky bucket it is the length of the queue, and an admitted request is delayed until the queue
-- ahead of it has drained.
--
-- Redis: a string of "b" and five doubles: the level in whole units, its fraction in W-ths of a
-- unit, their time in microseconds, the time until which the key lives at least, and W.
--   GET rate_limit:{user123}:per-user
--   ->   "b", 7, 12000000, 1700000000123456, 1700000008643456, 60000000
--
-- The key expires when the level has drained, and later by one to two sixteenths of the time in
-- which a full bucket drains, or if it is in use already, by the time of two to four units. Within
-- that slack, further requests need not set the expiry again, which costs nearly as much as the
-- rest of a write, but overwrite the level, its fraction and its time in place (SETRANGE). Expiries
-- are multiples of the slack, so that the buckets of a call mostly share one.
--
-- general.lua includes this file, and says what its functions do.
-- inputs
-- luacheck: read globals call expiry floor is_count is_time mul_div_rem now pack read unpack_struct
-- outputs
-- luacheck: globals algorithms

-- The clock skew, in microseconds, up to which a stored time later than now does not mean that the
-- clock stepped back.
local MAX_CLOCK_SKEW = 1000

-- Returns the time to drain `units` and the fraction.
local function drain_time(state, quota, units)
  local quotient, remainder = mul_div_rem(units, quota.window, quota.limit)
  local parts = remainder + state.part
  local whole_parts = floor(parts / quota.limit)
  return quotient + whole_parts + (parts > whole_parts * quota.limit and 1 or 0)
end

local bucket = {
  load = function(key, quota)
    local window = quota.window
    local state = {level = 0, part = 0, time = now, lives_until = 0}
    local text = read('GET', key)
    if text == false then return state end
    state.is_foreign = true
    if not text or #text ~= 41 then return state end
    local tag, level, part, time, lives_until, stored_window = unpack_struct('<Bddddd', text)
    if tag ~= 98 or not (is_count(level) and is_time(part) and is_time(time)) then return state end
    state.is_foreign, state.has_other_window = false, stored_window ~= window
    -- The fraction is in parts of another window: round it up to a whole unit, which never admits
    -- too much.
    if part > 0 and (part >= window or stored_window ~= window) then
      level, part = level + 1, 0
    end
    -- The limit was lowered.
    if level >= quota.max_level then level, part = quota.max_level, 0 end
    state.stepped_back = time > now + MAX_CLOCK_SKEW and time
    if not state.stepped_back then state.time = math.max(time, now) end
    if time < now then
      local units, parts = mul_div_rem(now - time, quota.limit, window)
      if part < parts then
        part = part + window
        units = units + 1
      end
      if level < units then
        level, part = 0, 0
      else
        level, part = level - units, part - parts
      end
    end
    state.level, state.part = level, part
    -- The key may expire before the level has drained, at the rate of today.
    state.is_stale = lives_until < state.time + drain_time(state, quota, level)
    return state
  end,

  remaining = function(state, quota)
    return math.max(0, quota.option - state.level - (state.part > 0 and 1 or 0))
  end,

  level = function(state)
    return state.level + (state.part > 0 and 1 or 0)
  end,

  overdrawn = function(state, quota)
    return state.level + (state.part > 0 and 1 or 0) > quota.option
  end,

  retry_after = function(state, quota, cost)
    return drain_time(state, quota, state.level + cost - quota.option)
  end,

  reset_after = function(state, quota, extra)
    return drain_time(state, quota, state.level + extra)
  end,

  counts_until = function(state, quota)
    return state.time + drain_time(state, quota, state.level)
  end,

  -- The level and its fraction, which determine the decision of each of several equal acquires.
  snapshot = function(state)
    return state.level, state.part
  end,

  delay = function(state, quota)
    return quota.kind == 7 and drain_time(state, quota, state.level) or 0
  end,

  spend = function(state, quota, cost)
    state.level = state.level + cost
  end,

  -- Returns the cost minus the units that have drained since the charge.
  refund = function(state, quota, cost, since)
    local age = since == 0 and 0 or math.max(0, state.time - since)
    local drained, parts = mul_div_rem(age, quota.limit, quota.window)
    local units = cost - drained
    if parts > 0 then units, parts = units - 1, quota.window - parts end
    if units < 0 then return end
    if state.part < parts then
      state.part = state.part + quota.window
      units = units + 1
    end
    if state.level < units then
      state.level, state.part = 0, 0
    else
      state.level, state.part = state.level - units, state.part - parts
    end
  end,

  is_empty = function(state)
    return state.level == 0 and state.part == 0
  end,

  save = function(key, state, quota)
    local drained_at = state.time + drain_time(state, quota, state.level)
    local sixteenth = floor(quota.option * quota.window / quota.limit / 16) + 1
    local lives_until = (floor(drained_at / sixteenth) + 2) * sixteenth
    call('SET', key, pack('<Bddddd', 98, state.level, state.part, state.time, lives_until,
      quota.window), 'PXAT', expiry(lives_until))
  end,
}

algorithms[6], algorithms[7] = bucket, bucket
