-- token-bucket and leaky-bucket, the twin of bucket.rs: one level that drains at L/W; a cost c is
-- admitted if level + c <= B. In a token bucket the level is the number of missing tokens. In a
-- leaky bucket it is the length of the queue, and an admitted request is delayed until the queue
-- ahead of it has drained.
--
-- Redis: a hash of the level in whole units, its fraction in W-ths of a unit, the time in
-- microseconds, and W. It expires when a full bucket would have drained. The field `kind`
-- distinguishes it from the hash of a sliding counter, in case the algorithm of a policy changes.
--   HGETALL rate_limit:{user123}:per-user
--   ->   kind bucket, level 7, part 12000000, time 1700000000123456, window 60000000

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

-- Returns the time in which a full bucket drains.
local function drain_micros(quota)
  return mul_div_ceil(quota.option, quota.window, quota.limit)
end

local bucket = {
  alt_suffix = 'bucket',

  load = function(key, quota)
    local window = quota.window
    local state = {level = 0, part = 0, time = now}
    local stored = read('HMGET', key, 'kind', 'level', 'part', 'time', 'window')
    if not stored then
      state.other_type = true
      return state
    end
    if stored[1] ~= 'bucket' then
      state.other_type, state.absent = stored[1], not stored[1]
      return state
    end
    local level, part, time = tonumber(stored[2]), tonumber(stored[3]), tonumber(stored[4])
    -- The fraction is in parts of another window: round it up to a whole unit, which never admits
    -- too much.
    if part > 0 and (part >= window or tonumber(stored[5]) ~= window) then
      level, part = level + 1, 0
    end
    -- The limit was lowered.
    if level >= quota.max_level then level, part = quota.max_level, 0 end
    state.stepped_back = time > now + MAX_CLOCK_SKEW
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
  snapshot = function(state, quota, reply, reply_len)
    reply[reply_len + 1], reply[reply_len + 2] = state.level, state.part
    return reply_len + 2
  end,

  delay = function(state, quota)
    return quota.name == 'leaky-bucket' and drain_time(state, quota, state.level) or 0
  end,

  spend = function(state, quota, cost)
    state.level = state.level + cost
  end,

  -- Returns the cost minus the units that have drained since the charge.
  refund = function(key, state, quota, cost, since)
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
    if not quota.expires then
      -- Formatting a number costs as much as a small command, so do it once for all buckets of this
      -- quota.
      quota.time, quota.expires = whole(now), whole(expiry(now + drain_micros(quota)))
    end
    local time = state.time == now and quota.time or whole(state.time)
    call('HSET', key, 'kind', 'bucket', 'level', state.level, 'part', state.part, 'time', time,
      'window', quota.window)
    local expires = quota.expires
    if state.level >= quota.option then
      -- An overdrawn bucket takes longer to drain.
      expires = expiry(state.time + drain_time(state, quota, state.level))
    end
    call('PEXPIREAT', key, expires)
  end,
}

algorithms['token-bucket'], algorithms['leaky-bucket'] = bucket, bucket
