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

local call, sub = redis.call, string.sub
local MEMBER = '^%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d:%d%d%d%d%d%d%d:%w+'
local eighth, edge = (window - window % 8) / 8, now - window
local after_now, after_edge, eighth_start = now + 1, edge + 1, now - now % eighth
-- To print a number costs as much as a small command, and to read one a fifth of that. So the times
-- of many members are compared as text: the 16 digits decide, whatever follows, in any locale.
local is_text = to - from >= 8
if is_text then
  after_now, after_edge = string.format('%016.0f', after_now), string.format('%016.0f', after_edge)
  eighth_start = string.format('%016.0f', eighth_start)
end
-- The header continues with the window as text.
local suffix = ':' .. sub(header, 81)
local now_text, edge_text, next_digits, expires, full_suffix, digits_from
for i = from, to do
  local key = keys[i]
  local newest = try('ZRANGE', key, '-1', '-1')
  if newest.err then rare = i break end
  newest = newest[1]
  -- units: units in the window; first: the oldest member in it; gone: members that have left it;
  -- is_current: whether the newest was written under this window (and costs 1); is_old: whether it
  -- was written before this eighth.
  local units, first, gone, is_current, is_old = 0, nil, 0, false, true
  local newest_time, first_time
  if newest then
    local tail, is_full = sub(newest, 25), false
    is_current = tail == suffix
    if not is_current then
      full_suffix = full_suffix or suffix .. '|' .. limit .. '|'
      is_full = sub(tail, 1, #full_suffix) == full_suffix
      is_current = is_full
      if not (is_full or string.find(newest, MEMBER)) then rare = i break end
    end
    if is_full or not is_text then newest_time = sub(newest, 1, 16) + 0 end
    local newest_at = is_text and newest or newest_time
    if newest_at >= after_now then rare = i break end
    is_old = newest_at < eighth_start
    if is_full then
      local digits = sub(tail, #full_suffix + 1)
      local modulus = #digits == 8 and 100000000 or 10 ^ #digits
      first_time = newest_time - (newest_time - digits) % modulus
    end
    if is_full and first_time > edge then
      units = limit
    elseif newest_at >= after_edge then
      -- The oldest member of all is mostly the oldest in the window, or the next one is.
      local rank = '0'
      units = nil
      while not units do
        first = call('ZRANGE', key, rank, rank)[1]
        local own = 1
        tail = sub(first or '', 25)
        if tail ~= suffix and not (full_suffix and sub(tail, 1, #full_suffix) == full_suffix) then
          if not string.find(first or '', MEMBER) then rare = i break end
          own = tonumber(string.match(tail, '^:%w+:(%d+)$')) or 1
        end
        first_time = not is_text and sub(first, 1, 16) + 0
        if (first_time or first) >= after_edge then
          units = (sub(newest, 18, 24) - sub(first, 18, 24) + own) % 9000000
          if units % 1 ~= 0 then rare = i break end
        elseif gone == 0 then
          gone, rank = 1, '1'
        else
          edge_text = edge_text or string.format('%.0f', edge)
          gone = rank == '1' and call('ZCOUNT', key, '-inf', edge_text) or 0
          if gone < 2 then rare = i break end
          rank = string.format('%.0f', gone)
        end
      end
      if rare then break end
    else
      gone = -1 -- all of them
    end
  end
  local remaining = limit - units
  if remaining < 0 then remaining = 0 end
  if total <= remaining then
    if spends then
      if not now_text then
        now_text = time == 0 and clock[1] .. sub('00000' .. clock[2], -6)
          or string.format('%016.0f', now)
      end
      if gone < 0 then
        try('UNLINK', key)
        newest, is_old = nil, true
      end
      -- Nine times in ten only the last digit of the total changes, and need not be printed.
      local digit, member = newest and total == 1 and string.byte(newest, 24), nil
      if digit and digit < 57 then
        next_digits = next_digits or {'1', '2', '3', '4', '5', '6', '7', '8', '9'}
        member = now_text .. sub(newest, 17, 23) .. next_digits[digit - 47] .. suffix
      else
        local last_total = (newest and sub(newest, 18, 24) or 1000000) + total
        if last_total > 9999999 then rare = i break end
        member = now_text .. ':' .. last_total .. suffix
        if total ~= 1 then member = member .. ':' .. total end
      end
      if total == 1 and remaining == 1 and (first or units == 0) then
        if not digits_from then
          digits_from = 9
          local modulus = 100000000
          while modulus <= window do digits_from, modulus = digits_from - 1, modulus * 10 end
        end
        member = member .. '|' .. limit .. '|' .. sub(first or now_text, digits_from, 16)
      end
      if try('ZADD', key, now_text, member) ~= 1 then rare = i break end
      if gone == 1 then
        call('ZREMRANGEBYRANK', key, '0', '0')
      elseif gone > 1 then
        if gone > removals then gone = removals > 4 and removals or 4 end
        removals = removals - gone
        call('ZREMRANGEBYRANK', key, '0', gone - 1)
      end
      if is_old or not is_current then
        if not expires then
          expires = now - now % eighth + eighth + window + expiry_shift
          expires = math.floor(expires / 1000) + 1
          if from < to then expires = string.format('%.0f', expires) end
        end
        if try('PEXPIREAT', key, expires) ~= 1 then rare = i break end
      end
    end
    if is_single then return pack('<ddd', server_time, times, remaining) end
    replied = replied + 1
    reply[replied] = pack('<dd', times, remaining)
  elseif cost > remaining and is_current and units > 0 and units + cost - limit <= 1 then
    -- The first member leaves room. Otherwise general.lua searches for the one that does.
    local retry_after = (first_time or sub(first, 1, 16)) + window - now
    local reset_after = (newest_time or sub(newest, 1, 16)) + window - now
    if not (retry_after > 0 and retry_after % 1 == 0 and reset_after >= retry_after
      and reset_after <= window) then
      rare = i
      break
    end
    if is_single then
      return pack('<ddddd', server_time, 0, remaining, retry_after, reset_after)
    end
    replied = replied + 1
    reply[replied] = pack('<dddd', 0, remaining, retry_after, reset_after)
  else
    rare = i
    break
  end
end

--------------------------------- general ---------------------------------

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
  local before = totals(call('ZRANGEBYSCORE', key, after, '+inf', 'LIMIT', 0, 1)[1])
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
