-- sliding-log as a sorted set, the twin of sliding_log.rs: admits when the units admitted in (now - W, now], plus the cost, are
-- at most L. Exact.
--
-- Redis: one member a request, its score the time in microseconds; for cost 1, ZCARD is the count. A member is
-- "<running total of units, this request's among them>:<its cost>". The total makes it unique, keeps requests of one
-- microsecond in order (it has 16 digits, always), and makes the units between two members a subtraction: a cost
-- of 10,000 is one member. The set expires when its newest member leaves the window.
--   ZRANGE rate_limit:{user123}:per-user 0 -1 WITHSCORES
--   ->   0000000000000041:1 1700000000000000   0000000000000046:5 1700000000250000

local function member(total, cost)
  return string.format('%016.0f:%.0f', total, cost)
end

-- The total before and after a member.
local function totals(text)
  local total, cost = string.match(text or '', '^(%d+):(%d+)$')
  total = tonumber(total)
  return total and total - tonumber(cost), total
end

-- The lowest rank from `low` to `high` whose total reaches `target`; `high` is known to.
local function rank_reaching(key, low, high, target)
  while low < high do
    local middle = floor((low + high) / 2)
    local _, total = totals(call('ZRANGE', key, middle, middle)[1])
    if total and total < target then low = middle + 1 else high = middle end
  end
  return low
end

-- Totals start again from zero, long before they would reach 2^53.
local function renumber(key, state)
  local base = state.total - state.units
  local entries = call('ZRANGE', key, 0, -1, 'WITHSCORES')
  call('DEL', key)
  for i = 1, #entries, 2 do
    local before, total = totals(entries[i])
    call('ZADD', key, entries[i + 1], member(total - base, total - before))
  end
  state.total = state.units
end

algorithms['sliding-log'] = {
  aside = 'log',
  counts_denied = true,

  -- total: of the newest member; units: those in the window; spent, refunded: what save() has to write.
  load = function(key, quota)
    local state = {key = key, total = 0, units = 0, newest = 0, spent = 0, refunded = 0}
    local newest = read('ZRANGE', key, '-1', '-1', 'WITHSCORES')
    local _, total = totals(newest and newest[1])
    if not total then
      state.foreign = not newest or newest[1] ~= nil
      return state
    end
    state.total, state.newest = total, tonumber(newest[2])
    if state.newest + quota.window > now then
      state.stepped_back = state.newest > now
      -- To write a number down costs as much as a small command: once for all logs of this quota.
      quota.edge = quota.edge or whole(now - quota.window)
      state.oldest = call('ZRANGEBYSCORE', key, '(' .. quota.edge, '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
      state.units = total - totals(state.oldest[1])
    end
    return state
  end,

  remaining = function(state, quota)
    return math.max(0, quota.limit - state.units)
  end,

  retry_after = function(state, quota, cost)
    -- If this denial counts as well, its own units are the newest, and have to leave last.
    local must_leave = state.units + (quota.count_denied and cost or 0) + cost - quota.limit
    if must_leave > state.units then return quota.window end
    local target = state.total - state.units + must_leave
    local _, oldest_total = totals(state.oldest[1])
    local leaves = tonumber(state.oldest[2])
    if oldest_total < target then
      local first = call('ZCOUNT', state.key, '-inf', now - quota.window)
      local rank = rank_reaching(state.key, first + 1, first + must_leave - 1, target)
      leaves = tonumber(call('ZRANGE', state.key, rank, rank, 'WITHSCORES')[2])
    end
    return math.min(leaves, now) + quota.window - now
  end,

  reset_after = function(state, quota, extra)
    if extra > 0 then return quota.window end
    return state.units == 0 and 0 or math.min(state.newest, now) + quota.window - now
  end,

  spend = function(state, quota, cost)
    state.spent = cost
    state.units = state.units + cost
  end,

  refund = function(state, quota, cost)
    state.refunded = math.min(cost, state.units)
    state.units = state.units - state.refunded
  end,

  is_empty = function(state)
    return state.units == 0
  end,

  save = function(key, state, quota)
    if not quota.expires then
      quota.edge = quota.edge or whole(now - quota.window)
      quota.now, quota.expires = whole(now), whole(expiry(now + quota.window))
    end
    -- The member first: a Redis that is out of memory refuses it, but would take whatever follows a removal.
    local total = state.total
    if state.spent > 0 then
      state.total = total + state.spent
      call('ZADD', key, quota.now, member(state.total, state.spent))
    end
    call('ZREMRANGEBYSCORE', key, '-inf', quota.edge)
    if state.stepped_back then
      -- What lies in the future becomes one member at now.
      local after = '(' .. whole(now)
      local before = totals(call('ZRANGEBYSCORE', key, after, '+inf', 'LIMIT', 0, 1)[1])
      call('ZREMRANGEBYSCORE', key, after, '+inf')
      call('ZADD', key, now, member(total, total - before))
      state.newest = now
    end
    if state.refunded > 0 then
      local target, last = state.total - state.refunded, call('ZCARD', key) - 1
      local rank = rank_reaching(key, math.max(0, last - state.refunded), last, target)
      call('ZREMRANGEBYRANK', key, rank + 1, -1)
      local newest = call('ZRANGE', key, -1, -1, 'WITHSCORES')
      local before, total = totals(newest[1])
      if total > target then
        call('ZREM', key, newest[1])
        call('ZADD', key, newest[2], member(target, target - before))
      end
      state.total, state.newest = target, tonumber(newest[2])
    end
    if state.spent > 0 then state.newest = now end
    -- Only denials that count get here with more than the limit. The newest L units say all that matters.
    if state.spent > 0 and quota.count_denied and state.units > quota.limit then
      local base = state.total - quota.limit
      local rank = rank_reaching(key, 0, state.units - quota.limit, base + 1)
      if rank > 0 then call('ZREMRANGEBYRANK', key, 0, rank - 1) end
      local oldest = call('ZRANGE', key, 0, 0, 'WITHSCORES')
      local before, total = totals(oldest[1])
      if before < base then
        call('ZREM', key, oldest[1])
        call('ZADD', key, oldest[2], member(total, total - base))
      end
      state.units = quota.limit
    end
    if state.total > 9e15 then renumber(key, state) end
    call('PEXPIREAT', key, state.newest == now and quota.expires or expiry(state.newest + quota.window))
  end,
}
