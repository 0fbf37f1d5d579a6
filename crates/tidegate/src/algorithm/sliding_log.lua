-- sliding-log as a sorted set, the twin of sliding_log.rs: admits a request if the units admitted
-- in (now - W, now] plus the cost are at most L. Exact.
--
-- Redis: one member per request, with the time in microseconds as its score. A member is "<running
-- total of units, including this request>:<cost>". The total makes the member unique, keeps
-- requests of one microsecond in order (it always has 16 digits), and makes the units between two
-- members one subtraction, so that a cost of 10,000 is one member. If all costs are 1, ZCOUNT of
-- the window is the count. Members that have left the window are removed in small batches, so that
-- no call takes long. The set expires when its newest member leaves the window.
--   ZRANGE rate_limit:{user123}:per-user 0 -1 WITHSCORES
--   ->   0000000000000041:1 1700000000000000   0000000000000046:5 1700000000250000

local TOTAL_MODULUS = 9e15 -- modulus of the running totals
-- One write per this many units removes members that have left the window.
local CLEANUP_INTERVAL = 8
-- The maximum numbers of members that a refund rewrites on the shorter side, and removes.
local MAX_REWRITTEN, MAX_REMOVED = 128, 1000
-- The maximum number of members that are removed after the clock stepped back. If there are more,
-- all members are replaced by one.
local MAX_COLLAPSED = 2000

local function member(total, cost)
  return string.format('%016.0f:%.0f', total, cost)
end

-- Returns the running total before and after a member.
local function totals(text)
  local total, cost = string.match(text or '', '^(%d+):(%d+)$')
  total = tonumber(total)
  return total and (total - cost) % TOTAL_MODULUS, total
end

-- Returns the lowest rank from `low` to `high` at which the total exceeds `base` by `units` or
-- more. At `high` it must.
local function rank_reaching(key, low, high, base, units)
  while low < high do
    local middle = floor((low + high) / 2)
    local _, total = totals(call('ZRANGE', key, middle, middle)[1])
    if total and (total - base) % TOTAL_MODULUS < units then low = middle + 1 else high = middle end
  end
  return low
end

-- Returns the score up to which members have left the window. If the clock stepped back, members
-- that had left by the last write do not return.
local function edge_of(state, quota)
  if state.stepped_back then return whole(state.newest - quota.window) end
  -- Formatting a number costs as much as a small command, so do it once for all logs of this quota.
  quota.edge = quota.edge or whole(now - quota.window)
  return quota.edge
end

-- Replaces members of the future by one member at now, after the clock stepped back.
local function collapse_future(key, state, quota)
  local edge, after = edge_of(state, quota), '(' .. whole(now)
  if call('ZCOUNT', key, '-inf', edge) + call('ZCOUNT', key, after, '+inf') > MAX_COLLAPSED then
    call('UNLINK', key)
    call('ZADD', key, now, member(state.total, state.units))
  else
    call('ZREMRANGEBYSCORE', key, '-inf', edge)
    local before = totals(call('ZRANGEBYSCORE', key, after, '+inf', 'LIMIT', 0, 1)[1])
    call('ZREMRANGEBYSCORE', key, after, '+inf')
    call('ZADD', key, now, member(state.total, (state.total - before) % TOTAL_MODULUS))
  end
  state.newest, state.stepped_back = now, false
end

-- Every script call creates all its functions, so the rarely needed ones are created on demand.
local function make_refund()
  -- Removes units from the first member in the window on, which has the rank `from`.
  local function remove_oldest(key, state, from, removed)
    local base = (state.total - state.units) % TOTAL_MODULUS
    local last = rank_reaching(key, from, from + removed - 1, base, removed)
    if last - from >= MAX_REMOVED then last = from + MAX_REMOVED - 1 end
    local entry = call('ZRANGE', key, last, last, 'WITHSCORES')
    local _, total = totals(entry[1])
    local left = (total - base) % TOTAL_MODULUS - removed
    if left > 0 then
      -- Add before removing: a Redis that is out of memory rejects the ZADD but accepts the ZREM.
      call('ZADD', key, entry[2], member(total, left))
      call('ZREM', key, entry[1])
    else
      last, removed = last + 1, removed + left
    end
    if last > from then call('ZREMRANGEBYRANK', key, from, last - 1) end
    state.units = state.units - removed
  end

  -- Rewrites the members of these ranks with totals increased by `shift`, and drops the first
  -- `removed` units.
  local function rewrite(key, from, to, shift, removed)
    local entries = call('ZRANGE', key, from, to, 'WITHSCORES')
    local added, old, kept = {}, {}, {}
    for i = 1, #entries, 2 do
      local before, total = totals(entries[i])
      local cost = (total - before) % TOTAL_MODULUS
      local skipped = math.min(cost, removed)
      removed = removed - skipped
      old[#old + 1] = entries[i]
      if cost > skipped then
        local text = member((total + shift) % TOTAL_MODULUS, cost - skipped)
        added[#added + 1], added[#added + 2] = entries[i + 1], text
        kept[text] = true
      end
    end
    if #added > 0 then call('ZADD', key, unpack(added)) end
    local gone = {}
    for i = 1, #old do
      if not kept[old[i]] then gone[#gone + 1] = old[i] end
    end
    if #gone > 0 then call('ZREM', key, unpack(gone)) end
  end

  return function(key, state, quota, cost, since)
    if state.stepped_back then collapse_future(key, state, quota) end
    local first = call('ZCOUNT', key, '-inf', edge_of(state, quota))
    if since == 0 then return remove_oldest(key, state, first, math.min(cost, state.units)) end
    if since + quota.window <= now then return end
    local from, count = call('ZCOUNT', key, '-inf', '(' .. whole(since)), call('ZCARD', key)
    if from >= count then return end
    local base = (state.total - state.units) % TOTAL_MODULUS
    local before = (totals(call('ZRANGE', key, from, from)[1]) - base) % TOTAL_MODULUS
    local removed = math.min(cost, state.units - before)
    if from <= first then return remove_oldest(key, state, first, removed) end
    local high = math.min(count - 1, from + removed - 1)
    local last = rank_reaching(key, from, high, base, before + removed)
    if last - from < MAX_REWRITTEN and count - last <= MAX_REWRITTEN then
      rewrite(key, from, count - 1, -removed, removed)
      state.total = (state.total - removed) % TOTAL_MODULUS
    elseif last - from < MAX_REWRITTEN and from - first <= MAX_REWRITTEN then
      -- Cut the units out, then increase the totals of the older members.
      rewrite(key, from, last, 0, removed)
      rewrite(key, first, from - 1, removed, 0)
    else
      -- Too many members on both sides: remove older units instead.
      return remove_oldest(key, state, first, removed)
    end
    state.units = state.units - removed
    local newest = call('ZRANGE', key, -1, -1, 'WITHSCORES')
    if newest[2] then state.newest = tonumber(newest[2]) end
  end
end

algorithms['sliding-log'] = {
  alt_suffix = 'log',
  supports_count_denied = true,

  -- total: running total of the newest member; units: units in the window; spent: units that save()
  -- has to write.
  load = function(key, quota)
    local state = {key = key, total = 0, units = 0, newest = 0, spent = 0}
    local newest = read('ZRANGE', key, '-1', '-1', 'WITHSCORES')
    local _, total = totals(newest and newest[1])
    if not total then
      state.other_type = not newest or newest[1] ~= nil
      state.absent = not state.other_type
      return state
    end
    state.total, state.newest = total, tonumber(newest[2])
    if state.newest + quota.window > now then
      state.stepped_back = state.newest > now
      local after = '(' .. edge_of(state, quota)
      state.oldest = call('ZRANGEBYSCORE', key, after, '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
      state.units = (total - totals(state.oldest[1])) % TOTAL_MODULUS
    end
    return state
  end,

  remaining = function(state, quota)
    return math.max(0, quota.limit - state.units)
  end,

  level = function(state)
    return state.units
  end,

  overdrawn = function(state, quota)
    return state.units > quota.limit
  end,

  retry_after = function(state, quota, cost, extra)
    local before = state.units - state.spent
    local must_leave = state.units + extra + cost - quota.limit
    if must_leave > before then return quota.window end
    local base = (state.total - before) % TOTAL_MODULUS
    local _, oldest_total = totals(state.oldest[1])
    local leaves = tonumber(state.oldest[2])
    if (oldest_total - base) % TOTAL_MODULUS < must_leave then
      local first = call('ZCOUNT', state.key, '-inf', edge_of(state, quota))
      local rank = rank_reaching(state.key, first + 1, first + must_leave - 1, base, must_leave)
      leaves = tonumber(call('ZRANGE', state.key, rank, rank, 'WITHSCORES')[2])
    end
    return math.min(leaves, now) + quota.window - now
  end,

  reset_after = function(state, quota, extra)
    if extra + state.spent > 0 then return quota.window end
    return state.units == 0 and 0 or math.min(state.newest, now) + quota.window - now
  end,

  counts_until = function(state, quota)
    return state.newest + quota.window
  end,

  spend = function(state, quota, cost)
    state.spent = cost
    state.units = state.units + cost
  end,

  refund = function(key, state, quota, cost, since)
    make_refund()(key, state, quota, cost, since)
  end,

  is_empty = function(state)
    return state.units == 0
  end,

  save = function(key, state, quota)
    if not quota.expires then
      quota.now, quota.expires = whole(now), whole(expiry(now + quota.window))
    end
    if state.stepped_back then
      state.units = state.units - state.spent
      collapse_future(key, state, quota)
      state.units = state.units + state.spent
    end
    local total, spent = state.total, state.spent
    if spent > 0 then
      state.total = (total + spent) % TOTAL_MODULUS
      call('ZADD', key, quota.now, member(state.total, spent))
      state.newest = now
    end
    if spent == 0 or total % CLEANUP_INTERVAL + spent >= CLEANUP_INTERVAL then
      local gone = call('ZCOUNT', key, '-inf', edge_of(state, quota))
      if gone > 0 then
        gone = math.min(gone, math.max(removals, 16))
        removals = removals - gone
        call('ZREMRANGEBYRANK', key, 0, gone - 1)
      end
    end
    -- Only counted denials exceed the limit here. Only the newest L units matter, so the others are
    -- removed in batches.
    if spent > 0 and quota.count_denied and state.units > quota.limit then
      local surplus = state.units - quota.limit
      local base = (state.total - state.units) % TOTAL_MODULUS
      local first = call('ZCOUNT', key, '-inf', edge_of(state, quota))
      local rank = rank_reaching(key, first, first + surplus, base, surplus + 1)
      local entry = call('ZRANGE', key, rank, rank, 'WITHSCORES')
      local before, last = totals(entry[1])
      local is_cut = (before - base) % TOTAL_MODULUS < surplus
      if is_cut then
        call('ZADD', key, entry[2], member(last, (last - base) % TOTAL_MODULUS - surplus))
        call('ZREM', key, entry[1])
      end
      if rank > 0 then call('ZREMRANGEBYRANK', key, 0, math.min(rank, MAX_REMOVED) - 1) end
      state.units = quota.limit
    end
    local expires = state.newest == now and quota.expires or expiry(state.newest + quota.window)
    call('PEXPIREAT', key, expires)
  end,
}
