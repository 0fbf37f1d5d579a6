-- sliding-log as a sorted set, the twin of sliding_log.rs: admits a request if the units admitted
-- in (now - W, now] plus the cost are at most L. Exact.
--
-- Redis: one member per request, with the time in microseconds as its score. A member is
-- "<time>:<running total of units, including this request>:<window>", and ":<cost>" if that is not
-- 1. The total makes the member unique, keeps requests of one microsecond in order (10^6 is added,
-- so that it always has 7 digits), and makes the units between two members one subtraction, so
-- that a cost of 10,000 is one member. If all costs are 1, ZCOUNT of the window is the count. The
-- member has the time again, because a read with scores costs twice as much, and the window,
-- because a write under another window must set the expiry.
--   ZRANGE rate_limit:{user123}:per-user 0 -1 WITHSCORES
--   ->   1700000000000000:1000041:60s 1700000000000000
--        1700000000250000:1000046:60s:5 1700000000250000
-- A member of cost 1 that leaves no room ends with "|<limit>|<last digits of the time of the oldest
-- request in the window>", so that a denial reads only this one. For example, if 94 requests follow
-- the two above, and the limit is 100:
--        1700000009000000:1000140:60s|100|00000000 1700000009000000
--
-- A write removes the members that have left the window: all at once if no other is left, else at
-- most 250 per call, so that no call takes long. The set expires when a request would leave
-- the window that comes at the end of the current eighth of a window. So only the first write in
-- each eighth sets the expiry.
--
-- general.lua includes this file, and says what its functions do.
-- inputs
-- luacheck: read globals as_text call check_slot expiry floor now read reserve sub whole
-- outputs
-- luacheck: globals algorithms removals

local TOTAL_BASE, TOTAL_MODULUS = 1e6, 9e6 -- of the running totals; units are at most 10^6
-- One write per this many units removes members that have left the window.
local CLEANUP_INTERVAL = 5
-- The maximum numbers of members that a refund rewrites, and removes.
local MAX_REWRITTEN, MAX_REMOVED = 128, 500

-- Returns a time as the first part of a member, and as a score.
local function digits(time)
  return string.format('%016.0f', time)
end

local function member(time_text, total, cost, window_text)
  local text = time_text .. ':' .. whole(TOTAL_BASE + total) .. ':' .. window_text
  return cost == 1 and text or text .. ':' .. whole(cost)
end

-- Returns the running total before and after a member, its time and its window; nothing if it is
-- not ours.
local function totals(text)
  local time, total, window, cost =
    string.match(text or '', '^(%d+):(%d+):(%w+):?(%d*)[|%d]*$')
  if not time or #time ~= 16 or #total ~= 7 or #cost > 13 then return nil end
  total = (total - TOTAL_BASE) % TOTAL_MODULUS
  return (total - (tonumber(cost) or 1)) % TOTAL_MODULUS, total, tonumber(time), window
end

-- Returns the time until which a log with this newest member lives.
local function lives_until(newest, quota)
  local eighth = floor(quota.window / 8)
  return newest - newest % eighth + eighth + quota.window
end

local function member_at(key, rank)
  return call('ZRANGE', key, rank, rank)[1]
end

-- Returns the lowest rank from `low` to `high` at which the total exceeds `base` by `units` or
-- more. At `high` it must.
local function rank_reaching(key, low, high, base, units)
  while low < high do
    local middle = floor((low + high) / 2)
    local _, total = totals(member_at(key, middle))
    if total and (total - base) % TOTAL_MODULUS < units then low = middle + 1 else high = middle end
  end
  return low
end

-- Returns the score up to which members have left the window. If the clock stepped back, members
-- that had left by the last write do not return.
local function edge_of(state, quota)
  return whole((state.stepped_back and state.newest or now) - quota.window)
end

-- Replaces members of the future by one member at now, after the clock stepped back. If there are
-- too many for this call, it replaces all members. The units stay the same.
local function collapse_future(state, quota)
  local key, edge, after = state.key, edge_of(state, quota), '(' .. whole(now)
  -- After a step of more than a window, members that have left the window are in the future, too.
  local first = '(' .. whole(math.max(now, tonumber(edge)))
  local before = totals(call('ZRANGEBYSCORE', key, first, '+inf', 'LIMIT', 0, 1)[1])
  local removed = call('ZCOUNT', key, '-inf', edge) + call('ZCOUNT', key, after, '+inf')
  local units = state.units
  if not before or removed > removals then
    check_slot(key)
    call('UNLINK', key)
  else
    call('ZREMRANGEBYSCORE', key, '-inf', edge)
    call('ZREMRANGEBYSCORE', key, after, '+inf')
    removals, units = removals - removed, (state.total - before) % TOTAL_MODULUS
  end
  state.member = member(digits(now), state.total, units, as_text(quota.window))
  call('ZADD', key, now, state.member)
  call('PEXPIREAT', key, expiry(lives_until(now, quota)))
  state.newest, state.stepped_back = now, false
end

-- Plans to replace a member by this text of the same time, or by none.
local function replace_member(state, entry, text)
  if text == entry then return end
  if text then
    local added = state.added
    added[#added + 1], added[#added + 2] = sub(text, 1, 16), text
  end
  state.dropped[entry] = true
  if entry == state.member then state.member = text end
end

-- Plans to remove units from the first member in the window on, which has the rank `from`.
local function remove_oldest(state, from, removed)
  local base = (state.total - state.units) % TOTAL_MODULUS
  local last = rank_reaching(state.key, from, from + removed - 1, base, removed)
  last = math.min(last, from + MAX_REMOVED - 1)
  local entry = member_at(state.key, last)
  local _, total, _, window = totals(entry)
  local left = (total - base) % TOTAL_MODULUS - removed
  if left > 0 then
    replace_member(state, entry, member(sub(entry, 1, 16), total, left, window))
  else
    last, removed = last + 1, removed + left
  end
  state.removed_from, state.removed_to = from, last - 1
  state.units = state.units - removed
  reserve((last - from) / 4)
end

-- Plans to remove units from the rank `start` on, and to change the totals of the members before
-- and after it: those of the ranks `from` to `to` are rewritten.
local function cut_out(state, from, start, to, removed, older_shift, newer_shift)
  local entries = call('ZRANGE', state.key, from, to)
  reserve(2 * #entries)
  local left = removed
  for i, entry in ipairs(entries) do
    local before, total, _, window = totals(entry)
    local cost, shift, text = (total - before) % TOTAL_MODULUS, older_shift, nil
    if from + i > start then
      local skipped = math.min(cost, left)
      left, cost, shift = left - skipped, cost - skipped, newer_shift
    end
    if cost > 0 then
      text = member(sub(entry, 1, 16), (total + shift) % TOTAL_MODULUS, cost, window)
    end
    replace_member(state, entry, text)
  end
  state.total, state.units = (state.total + newer_shift) % TOTAL_MODULUS, state.units - removed
end

algorithms[1] = {
  supports_count_denied = true,

  -- member, total, newest: text, running total and time of the newest member; units: units in the
  -- window; spent: units that save() has to write. A refund plans its changes: `added` are scores
  -- and members, `dropped` members, and removed_from to removed_to ranks.
  load = function(key, quota)
    local state = {key = key, total = 0, units = 0, newest = 0, spent = 0}
    local newest = read('ZRANGE', key, '-1', '-1')
    local _, total, time = totals(newest and newest[1])
    if not total then
      state.is_foreign = not newest or newest[1] ~= nil
      return state
    end
    if time + quota.window > now then
      local after = '(' .. whole(math.max(time, now) - quota.window)
      local oldest = call('ZRANGEBYSCORE', key, after, '+inf', 'LIMIT', '0', '1')[1]
      local before = totals(oldest)
      state.is_foreign = not before
      if not before then return state end
      state.oldest, state.units = oldest, (total - before) % TOTAL_MODULUS
    end
    state.member, state.total, state.newest, state.is_stale = newest[1], total, time, true
    state.stepped_back = time > now and time
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
    local _, oldest_total, leaves = totals(state.oldest)
    if (oldest_total - base) % TOTAL_MODULUS < must_leave then
      local first = call('ZCOUNT', state.key, '-inf', edge_of(state, quota))
      local rank = rank_reaching(state.key, first + 1, first + must_leave - 1, base, must_leave)
      _, _, leaves = totals(member_at(state.key, rank))
    end
    return math.min(leaves or now, now) + quota.window - now
  end,

  reset_after = function(state, quota, extra)
    if extra + state.spent > 0 then return quota.window end
    return state.units == 0 and 0 or math.min(state.newest, now) + quota.window - now
  end,

  counts_until = function(state, quota)
    return state.newest + quota.window
  end,

  spend = function(state, quota, cost)
    state.spent = state.spent + cost
    state.units = state.units + cost
  end,

  refund = function(state, quota, cost, since)
    if since > 0 and since + quota.window <= now then return end
    if state.stepped_back then collapse_future(state, quota) end
    state.added, state.dropped = {}, {}
    local key, units = state.key, state.units
    local first, from, before = call('ZCOUNT', key, '-inf', edge_of(state, quota)), 0, 0
    if since > 0 then
      from = call('ZCOUNT', key, '-inf', '(' .. whole(since))
      local entry = member_at(key, from)
      if not entry then return end
      if from > first then before = (totals(entry) - state.total + units) % TOTAL_MODULUS end
    end
    local removed = math.min(cost, units - before)
    if removed <= 0 then return end
    if from <= first then
      remove_oldest(state, first, removed)
    else
      local base, newer = (state.total - units) % TOTAL_MODULUS, call('ZCARD', key) - from
      local high = math.min(from + newer, from + removed) - 1
      local last = rank_reaching(key, from, high, base, before + removed)
      if newer <= MAX_REWRITTEN then
        cut_out(state, from, from, from + newer - 1, removed, 0, -removed)
      elseif last - first < MAX_REWRITTEN then
        cut_out(state, first, from, last, removed, removed, 0)
      else
        -- Too many members on both sides: remove older units instead.
        remove_oldest(state, first, removed)
      end
    end
    -- The mark of a used up limit is wrong now. Only that of the newest member is ever read.
    state.member = state.member or member_at(key, from - 1)
    replace_member(state, state.member, string.match(state.member, '^[^|]*'))
    local _, _, newest = totals(state.member)
    state.newest = newest
  end,

  is_empty = function(state)
    return state.units == 0
  end,

  save = function(key, state, quota)
    if state.stepped_back then
      state.units = state.units - state.spent
      collapse_future(state, quota)
      state.units = state.units + state.spent
    end
    if state.added then
      -- Add before removing: a Redis that is out of memory rejects the ZADD but accepts the ZREM.
      local dropped = {}
      for i = 2, #state.added, 2 do state.dropped[state.added[i]] = nil end
      for entry in pairs(state.dropped) do dropped[#dropped + 1] = entry end
      if #state.added > 0 then call('ZADD', key, unpack(state.added)) end
      if #dropped > 0 then call('ZREM', key, unpack(dropped)) end
      if state.removed_from and state.removed_to >= state.removed_from then
        call('ZREMRANGEBYRANK', key, state.removed_from, state.removed_to)
      end
    end
    local total, spent = state.total, state.spent
    if spent > 0 then
      state.total = (total + spent) % TOTAL_MODULUS
      local cost = spent
      if state.total < total and state.newest == now then
        -- The totals start again at 0: members of one time would be in the wrong order.
        local at = whole(now)
        local first = call('ZRANGEBYSCORE', key, at, at, 'LIMIT', 0, 1)[1]
        cost = (state.total - totals(first)) % TOTAL_MODULUS
        call('ZREMRANGEBYSCORE', key, at, at)
      end
      call('ZADD', key, now, member(digits(now), state.total, cost, as_text(quota.window)))
      state.newest = now
    end
    if spent == 0 or total % CLEANUP_INTERVAL + spent >= CLEANUP_INTERVAL then
      local gone = call('ZCOUNT', key, '-inf', edge_of(state, quota))
      if gone > 0 then
        gone = math.min(gone, math.max(removals, 4))
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
      local entry = member_at(key, rank)
      local before, last, _, window = totals(entry)
      if before and (before - base) % TOTAL_MODULUS < surplus then
        local at, left = sub(entry, 1, 16), (last - base) % TOTAL_MODULUS - surplus
        call('ZADD', key, at, member(at, last, left, window))
        call('ZREM', key, entry)
      end
      if rank > 0 then call('ZREMRANGEBYRANK', key, 0, math.min(rank, MAX_REMOVED) - 1) end
      state.units = quota.limit
    end
    call('PEXPIREAT', key, expiry(lives_until(state.newest, quota)))
  end,
}
