-- sliding-log as a sorted set, the twin of sliding_log.rs: admits a request if the units admitted
-- in (now - W, now] plus the cost are at most L. Exact.
--
-- Redis: one member per request, with the time in microseconds as its score. A member is
-- "<time>:<running total of units, including this request>:<window>", and ":<cost>" if that is not
-- 1. The total makes the member unique, keeps requests of one microsecond in order (10^13 is added,
-- so that it always has 14 digits), and makes the units between two members one subtraction, so
-- that a cost of 10,000 is one member. If all costs are 1, ZCOUNT of the window is the count. The
-- member has the time again, because a read with scores costs twice as much, and the window,
-- because a write under another window must set the expiry.
--   ZRANGE rate_limit:{user123}:per-user 0 -1 WITHSCORES
--   ->   1700000000000000:10000000000041:60s 1700000000000000
--        1700000000250000:10000000000046:60s:5 1700000000250000
--
-- Members that have left the window are removed in small batches, so that no call takes long. The
-- set expires when a request would leave the window that comes at the end of the current eighth of
-- a window. So only the first write in each eighth sets the expiry.

-- The header continues with the window as text.
local edge, eighth, window_text = now - window, now - now % floor(window / 8), sub(argv[run], 81)
local suffix, now_text, edge_text, expires = ':' .. window_text, nil, nil, nil
for i = from, to do
  local key = keys[i]
  local newest = try('ZRANGE', key, '-1', '-1')
  -- units: units in the window; gone: whether the oldest member has left it; is_current: whether
  -- the newest one was written under this window (and costs 1).
  local units, newest_time, first_time, gone, is_current = 0, 0, nil, false, false
  if newest[1] then
    newest = newest[1]
    is_current = sub(newest, 32) == suffix
    if not (is_current or string.find(newest, '^%d+:%d+:%w+')) then rare = i break end
    newest_time = sub(newest, 1, 16) + 0
    if newest_time > now then rare = i break end
    if newest_time > edge then
      -- The oldest member of all is mostly the oldest in the window.
      local first = try('ZRANGE', key, '0', '0')[1]
      local own = sub(first, 32) == suffix and 1
      if not (own or string.find(first, '^%d+:%d+:%w+')) then rare = i break end
      first_time = sub(first, 1, 16) + 0
      if first_time <= edge then
        gone = true
        edge_text = edge_text or string.format('%.0f', edge)
        first = call('ZRANGEBYSCORE', key, '(' .. edge_text, '+inf', 'LIMIT', '0', '1')[1]
        own, first_time = sub(first, 32) == suffix and 1, sub(first, 1, 16) + 0
      end
      own = own or tonumber(string.match(first, ':(%d+)$', 32)) or 1
      -- The units in a window have at most seven digits.
      units = (sub(newest, 24, 31) - sub(first, 24, 31) + own) % 100000000
    else
      gone = true
    end
  elseif newest.err then
    rare = i
    break
  end
  local remaining = limit - units
  if remaining < 0 then remaining = 0 end
  if total <= remaining then
    if spends then
      if not now_text then
        now_text = time == 0 and clock[1] .. sub('00000' .. clock[2], -6)
          or string.format('%016.0f', now)
      end
      -- Printing a number costs as much as a small command. Nine times in ten only the last digit
      -- of the total changes.
      local digit, cleans, member = newest_time > 0 and total == 1 and string.byte(newest, 31)
      if digit and digit < 57 then
        cleans = gone and digit == 52
        member = now_text .. ':' .. sub(newest, 18, 30) .. sub('123456789', digit - 47, digit - 47)
          .. suffix
      else
        cleans = gone
        local last_total = newest_time > 0 and sub(newest, 18, 31) or 10000000000000
        last_total = last_total + total
        if last_total > 99999999999999 then rare = i break end
        member = now_text .. ':' .. last_total .. suffix
        if total ~= 1 then member = member .. ':' .. string.format('%.0f', total) end
      end
      if try('ZADD', key, now_text, member) ~= 1 then rare = i break end
      if cleans then
        edge_text = edge_text or string.format('%.0f', edge)
        local surplus = call('ZCOUNT', key, '-inf', edge_text)
        if surplus > removals then surplus = removals > 16 and removals or 16 end
        if surplus > 0 then
          removals = removals - surplus
          call('ZREMRANGEBYRANK', key, 0, surplus - 1)
        end
      end
      if not is_current or newest_time < eighth then
        if not expires then
          expires = floor((eighth + floor(window / 8) + window + expiry_shift) / 1000) + 1
          if from < to then expires = string.format('%.0f', expires) end
        end
        call('PEXPIREAT', key, expires)
      end
    end
    replied = replied + 1
    reply[replied] = pack('<dd', times, remaining)
  elseif cost > remaining and is_current and first_time and units + cost - limit <= 1 then
    -- The first member leaves room. Otherwise general.lua searches for the one that does.
    replied = replied + 1
    reply[replied] = pack('<dddd', 0, remaining, first_time + window - now,
      newest_time + window - now)
  else
    rare = i
    break
  end
end

--------------------------------- general ---------------------------------

local TOTAL_BASE, TOTAL_MODULUS = 1e13, 9e13 -- of the running totals
-- One write per this many units removes members that have left the window.
local CLEANUP_INTERVAL = 5
-- The maximum numbers of members that a refund rewrites on the shorter side, and removes.
local MAX_REWRITTEN, MAX_REMOVED = 128, 1000
-- The maximum number of members that are removed after the clock stepped back. If there are more,
-- all members are replaced by one.
local MAX_COLLAPSED = 2000

local function member(time, total, cost, quota)
  local text = string.format('%016.0f:%.0f:', time, TOTAL_BASE + total) .. as_text(quota.window)
  return cost == 1 and text or text .. ':' .. whole(cost)
end

-- Returns the running total before and after a member, and its time; nothing if it is not ours.
local function totals(text)
  local time, total, cost = string.match(text or '', '^(%d+):(%d+):%w+:?(%d*)$')
  if not time or #time ~= 16 or #total ~= 14 then return nil end
  total = (total - TOTAL_BASE) % TOTAL_MODULUS
  return (total - (tonumber(cost) or 1)) % TOTAL_MODULUS, total, tonumber(time)
end

-- Returns the time until which a log with this newest member lives.
local function lives_until(newest, quota)
  local eighth = floor(quota.window / 8)
  return newest - newest % eighth + eighth + quota.window
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
  return whole((state.stepped_back and state.newest or now) - quota.window)
end

-- Replaces members of the future by one member at now, after the clock stepped back.
local function collapse_future(key, state, quota)
  local edge, after = edge_of(state, quota), '(' .. whole(now)
  if call('ZCOUNT', key, '-inf', edge) + call('ZCOUNT', key, after, '+inf') > MAX_COLLAPSED then
    call('UNLINK', key)
    call('ZADD', key, now, member(now, state.total, state.units, quota))
  else
    call('ZREMRANGEBYSCORE', key, '-inf', edge)
    local before = totals(call('ZRANGEBYSCORE', key, after, '+inf', 'LIMIT', 0, 1)[1])
    call('ZREMRANGEBYSCORE', key, after, '+inf')
    call('ZADD', key, now, member(now, state.total, (state.total - before) % TOTAL_MODULUS, quota))
  end
  state.newest, state.stepped_back = now, false
end

-- Removes units from the first member in the window on, which has the rank `from`.
local function remove_oldest(key, state, quota, from, removed)
  local base = (state.total - state.units) % TOTAL_MODULUS
  local last = rank_reaching(key, from, from + removed - 1, base, removed)
  if last - from >= MAX_REMOVED then last = from + MAX_REMOVED - 1 end
  local entry = call('ZRANGE', key, last, last)[1]
  local _, total, time = totals(entry)
  local left = (total - base) % TOTAL_MODULUS - removed
  if left > 0 then
    -- Add before removing: a Redis that is out of memory rejects the ZADD but accepts the ZREM.
    call('ZADD', key, time, member(time, total, left, quota))
    call('ZREM', key, entry)
  else
    last, removed = last + 1, removed + left
  end
  if last > from then call('ZREMRANGEBYRANK', key, from, last - 1) end
  state.units = state.units - removed
end

-- Rewrites the members of these ranks with totals increased by `shift`, and drops the first
-- `removed` units.
local function rewrite(key, quota, from, to, shift, removed)
  local entries = call('ZRANGE', key, from, to)
  local added, gone, kept = {}, {}, {}
  for i = 1, #entries do
    local before, total, time = totals(entries[i])
    local cost = (total - before) % TOTAL_MODULUS
    local skipped = math.min(cost, removed)
    removed = removed - skipped
    if cost > skipped then
      local text = member(time, (total + shift) % TOTAL_MODULUS, cost - skipped, quota)
      added[#added + 1], added[#added + 2] = time, text
      kept[text] = true
    end
  end
  if #added > 0 then call('ZADD', key, unpack(added)) end
  for i = 1, #entries do
    if not kept[entries[i]] then gone[#gone + 1] = entries[i] end
  end
  if #gone > 0 then call('ZREM', key, unpack(gone)) end
end

algorithms[1] = {
  supports_count_denied = true,

  -- total: running total of the newest member; units: units in the window; spent: units that save()
  -- has to write.
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
    state.total, state.newest, state.is_stale = total, time, true
    state.stepped_back = time > now
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
      _, _, leaves = totals(call('ZRANGE', state.key, rank, rank)[1])
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
    state.spent = cost
    state.units = state.units + cost
  end,

  refund = function(key, state, quota, cost, since)
    if state.stepped_back then collapse_future(key, state, quota) end
    local first = call('ZCOUNT', key, '-inf', edge_of(state, quota))
    if since == 0 then
      return remove_oldest(key, state, quota, first, math.min(cost, state.units))
    end
    if since + quota.window <= now then return end
    local from, count = call('ZCOUNT', key, '-inf', '(' .. whole(since)), call('ZCARD', key)
    if from >= count then return end
    local base = (state.total - state.units) % TOTAL_MODULUS
    local before = (totals(call('ZRANGE', key, from, from)[1]) - base) % TOTAL_MODULUS
    local removed = math.min(cost, state.units - before)
    if from <= first then return remove_oldest(key, state, quota, first, removed) end
    local high = math.min(count - 1, from + removed - 1)
    local last = rank_reaching(key, from, high, base, before + removed)
    if last - from < MAX_REWRITTEN and count - last <= MAX_REWRITTEN then
      rewrite(key, quota, from, count - 1, -removed, removed)
      state.total = (state.total - removed) % TOTAL_MODULUS
    elseif last - from < MAX_REWRITTEN and from - first <= MAX_REWRITTEN then
      -- Cut the units out, then increase the totals of the older members.
      rewrite(key, quota, from, last, 0, removed)
      rewrite(key, quota, first, from - 1, removed, 0)
    else
      -- Too many members on both sides: remove older units instead.
      return remove_oldest(key, state, quota, first, removed)
    end
    state.units = state.units - removed
    local _, _, newest = totals(call('ZRANGE', key, -1, -1)[1])
    state.newest = newest or state.newest
  end,

  is_empty = function(state)
    return state.units == 0
  end,

  save = function(key, state, quota)
    if state.stepped_back then
      state.units = state.units - state.spent
      collapse_future(key, state, quota)
      state.units = state.units + state.spent
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
      call('ZADD', key, now, member(now, state.total, cost, quota))
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
      local entry = call('ZRANGE', key, rank, rank)[1]
      local before, last, time = totals(entry)
      if (before - base) % TOTAL_MODULUS < surplus then
        call('ZADD', key, time, member(time, last, (last - base) % TOTAL_MODULUS - surplus, quota))
        call('ZREM', key, entry)
      end
      if rank > 0 then call('ZREMRANGEBYRANK', key, 0, math.min(rank, MAX_REMOVED) - 1) end
      state.units = quota.limit
    end
    call('PEXPIREAT', key, expiry(lives_until(state.newest, quota)))
  end,
}
