-- token-bucket and leaky-bucket, the twin of bucket.rs: one level that drains at L/W, and admits when level + c <= B.
-- For a token bucket the level is what is missing from it; for a leaky bucket it is the queue, and the delay of
-- what is admitted is the time that the queue ahead of it takes.
--
-- Redis: a hash of the level in whole units, its part in W-ths of a unit, and the time in microseconds; expires when a
-- full bucket would have drained, at `until`. (The kind tells it from the hash of a sliding counter, should a policy's
-- algorithm change.)
--   HGETALL rate_limit:{user123}:per-user
--   ->   kind bucket, level 7, part 12000000, time 1700000000123456, until 1700000060123456

-- How long to drain `units` and the part.
local function drain_time(state, quota, units)
  local quotient, rest = mul_div_rem(units, quota.window, quota.limit)
  local parts = rest + state.part
  local whole_parts = floor(parts / quota.limit)
  return quotient + whole_parts + (parts > whole_parts * quota.limit and 1 or 0)
end

-- How long a full bucket takes to drain.
local function drain_micros(quota)
  return mul_div_ceil(quota.option, quota.window, quota.limit)
end

local bucket = {
  aside = 'bucket',

  load = function(key, quota)
    local window, burst = quota.window, quota.option
    local state = {level = 0, part = 0}
    local stored = read('HMGET', key, 'kind', 'level', 'part', 'time', 'until')
    if not stored then
      state.foreign = true
      return state
    end
    if stored[1] ~= 'bucket' then
      state.foreign = stored[1]
      return state
    end
    local level, part, time = tonumber(stored[2]), tonumber(stored[3]), tonumber(stored[4])
    -- A limit was lowered, and the key would expire before it has drained.
    state.short_lived = tonumber(stored[5]) < time + drain_micros(quota)
    -- A limit or window that was changed: no more than a full bucket.
    if part >= window then level, part = level + 1, 0 end
    if level >= burst then level, part = burst, 0 end
    state.stepped_back = time > now
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
    return quota.option - state.level - (state.part > 0 and 1 or 0)
  end,

  retry_after = function(state, quota, cost)
    return drain_time(state, quota, state.level + cost - quota.option)
  end,

  reset_after = function(state, quota, extra)
    return drain_time(state, quota, state.level + extra)
  end,

  -- The level and its part: what each of several acquires is told follows from them.
  evidence = function(state, quota, reply, replied)
    reply[replied + 1], reply[replied + 2] = state.level, state.part
    return replied + 2
  end,

  delay = function(state, quota)
    return quota.name == 'leaky-bucket' and drain_time(state, quota, state.level) or 0
  end,

  spend = function(state, quota, cost)
    state.level = state.level + cost
  end,

  refund = function(state, quota, cost)
    if state.level < cost then
      state.level, state.part = 0, 0
    else
      state.level = state.level - cost
    end
  end,

  is_empty = function(state)
    return state.level == 0 and state.part == 0
  end,

  save = function(key, state, quota)
    if not quota.expires then
      -- The same for all buckets of this quota. To write a number down costs as much as a small command.
      local drained = now + drain_micros(quota)
      quota.time, quota.drained, quota.expires = whole(now), whole(drained), whole(expiry(drained))
    end
    call('HSET', key, 'kind', 'bucket', 'level', state.level, 'part', state.part, 'time', quota.time, 'until', quota.drained)
    call('PEXPIREAT', key, quota.expires)
  end,
}

algorithms['token-bucket'], algorithms['leaky-bucket'] = bucket, bucket
