-- Decides what the fast paths of decide.lua do not: groups of charges, and counts in an unusual
-- state (the clock stepped back, the window was changed, a value that is not ours …). decide.lua
-- includes this text where it is needed. Each algorithm is a table of functions in its own file, of
-- which only those of this call are created.
-- inputs
-- luacheck: read globals clock cost expiry_shift keys kind limit option pack server_time time times
-- luacheck: read globals try unpack_struct window
-- outputs
-- luacheck: globals decide_group decide_slow now replied reply resets
-- luacheck: no unused

local sub, floor = string.sub, math.floor
local whole, mul_div_rem, mul_div_ceil
include('arithmetic.lua')

-- Work of this part in this call, in commands, so that no call takes long: after MAX_WORK, further
-- requests are answered with LATER. `before_request` is the work before the current request: the
-- first one always runs.
local MAX_WORK = 128
local work, before_request = 0, 0
local LATER = {err = 'LATER'}

local function call(...)
  work = work + 1
  return redis.call(...)
end

-- Adds work that follows, or leaves this request to a later call. Nothing must be written before.
local function reserve(additional)
  if before_request > 0 and work + additional > MAX_WORK then error(LATER) end
  work = work + additional
end

-- Returns the argument of PEXPIREAT for a key that counts until this microsecond: the millisecond
-- after it, because PEXPIREAT with the current millisecond deletes the key at once.
local function expiry(micros)
  return floor((micros + expiry_shift) / 1000) + 1
end

-- Reads a key. Returns nil if it has another type: a value that is not ours counts as none, and is
-- overwritten.
local function read(...)
  work = work + 1
  local found = try(...)
  if type(found) == 'table' and found.err then
    if found.err:find('WRONGTYPE', 1, true) then return nil end
    return call(...) -- raises the original error
  end
  return found
end

-- Returns the error with which a node refuses to write a missing key of this slot: the slot is
-- migrating, and its missing keys belong to the other node. No count has the name that is read.
local function migration_error(key)
  work = work + 1
  local found = try('PTTL', key .. '\0')
  return type(found) == 'table' and found.err:find('non local key', 1, true) and found
end

-- Raises an error if a count that is deleted could not be written again.
local function check_slot(key)
  local found = migration_error(key)
  if found then error(found) end
end

-- Sets the expiry of a key, unless it lives longer already.
local function extend(key, expires_at)
  local ttl = call('PTTL', key)
  if ttl == -2 then return end
  if ttl == -1 or floor(server_time / 1000) + ttl < expires_at - 1 then
    call('PEXPIREAT', key, expires_at)
  end
end

-- Returns a window as text, as the client does.
local function as_text(window)
  if window % 1000000 == 0 then return whole(window / 1000000) .. 's' end
  if window % 1000 == 0 then return whole(window / 1000) .. 'ms' end
  return whole(window) .. 'us'
end

-- Returns whether a stored number can be a number of units, or a time in microseconds.
local function is_count(number)
  return number and number >= 0 and number <= 1e13 and floor(number) == number
end
local function is_time(number)
  return number and number >= 0 and number < 9007199254740992 and floor(number) == number
end

local algorithms = {}
local function load_algorithm(kind)
  if kind == 1 then
    include('sliding_log.lua')
  elseif kind == 2 then
    include('sliding_log_packed.lua')
  elseif kind <= 4 then
    include('sliding_counter.lua')
  elseif kind == 5 then
    include('fixed_window.lua')
  elseif kind <= 7 then
    include('bucket.lua')
  else
    include('concurrency.lua')
  end
end

local function new_quota(kind, limit, window, option)
  if kind < 0 then error(LATER) end
  if not algorithms[kind] then load_algorithm(kind) end
  local algorithm = algorithms[kind]
  local is_log = algorithm.supports_count_denied
  return {
    kind = kind,
    algorithm = algorithm,
    limit = limit,
    window = window,
    option = option,
    count_denied = is_log and option == 1,
    -- Recorded units are capped at ten times the capacity.
    max_level = math.min(10 * (kind > 5 and option or limit), 1e12),
  }
end

-- Finds the count of another algorithm or encoding. Returns its quota, at the rate of this one,
-- with its state and capacity; nil if the value is not ours.
local function find_another(key, quota)
  if quota.kind == 8 then return nil end
  local burst = quota.kind > 5 and quota.option or quota.limit
  for kind = 1, 6 do
    if kind ~= quota.kind then
      local another = new_quota(kind, quota.limit, quota.window, kind == 6 and burst or 0)
      another.state = another.algorithm.load(key, another)
      if not another.state.is_foreign then
        another.capacity, another.burst = kind == 6 and burst or quota.limit, burst
        return another
      end
    end
  end
end

-- Up to this time, a count that is ahead of an estimated clock has the time: it is `now` for the
-- current request. With the server's own time, such a count shows that the clock stepped back.
local latest = time == 0 and clock.max_skew and now + clock.max_skew or 0

-- Loads the count of a key. If a changed policy now has another algorithm, the units in use count
-- as used now; so it is while a change is rolled out and instances use both, in turn. As a denied
-- request writes nothing, a key is never denied for longer than a window by that.
local function load(key, quota)
  local algorithm = quota.algorithm
  local state = algorithm.load(key, quota)
  if state.stepped_back and state.stepped_back <= latest then
    now = state.stepped_back
    state = algorithm.load(key, quota)
  end
  if state.is_foreign then
    state.is_stale = false
    state.another = find_another(key, quota)
    if state.another then
      local another = state.another
      local units = another.capacity - another.algorithm.remaining(another.state, another)
      if units > 0 then algorithm.spend(state, quota, units) end
    end
  end
  return state
end

-- Returns reset_after of a decision that spends `extra`. If it spends nothing, a count of another
-- algorithm stays as it is, and so do its times.
local function reset_after(state, quota, extra)
  local another = state.another
  if another and extra == 0 then
    return another.algorithm.reset_after(another.state, another, 0)
  end
  return quota.algorithm.reset_after(state, quota, extra)
end

-- Returns retry_after and reset_after of a denial that spends `extra`.
local function times_of_denial(state, quota, cost, extra)
  local another = state.another
  if another and extra == 0 then
    cost = cost + another.capacity - another.burst
    local wait = another.algorithm.retry_after(another.state, another, cost, 0)
    -- A cache of denials derives the level of a bucket from reset_after: it must not be too high.
    return wait, quota.kind > 5 and wait or reset_after(state, quota, 0)
  end
  return quota.algorithm.retry_after(state, quota, cost, extra), reset_after(state, quota, extra)
end

-- Plans the write of a count, before anything is written: one that must be deleted first would be
-- lost while its slot is migrating.
local function prepare(key, state, quota)
  local algorithm = quota.algorithm
  state.is_prepared = true
  if algorithm.is_empty(state) then return end
  if algorithm.prepare then algorithm.prepare(key, state, quota) end
  if state.is_foreign or state.must_unlink then check_slot(key) end
end

local function save(key, state, quota)
  if not state.is_prepared then prepare(key, state, quota) end
  -- A refund by an instance with an older, shorter window must not shorten the life of the count.
  local has_other_window = state.is_refund and (state.is_stale or state.has_other_window)
  local ttl = has_other_window and call('PTTL', key) or 0
  local is_empty = quota.algorithm.is_empty(state)
  if state.is_foreign or state.must_unlink or is_empty then call('UNLINK', key) end
  if not is_empty then quota.algorithm.save(key, state, quota) end
  if ttl > 0 then extend(key, floor(server_time / 1000) + ttl) end
end

-- Extends the expiry of a count, which a longer window or a lower rate requires. A denied request
-- writes nothing else, unless its denial counts or the clock stepped back.
local function keep_alive(key, state, quota)
  -- The count of another algorithm stays as it is, and counts at the rate of this one.
  if state.another then state, quota = state.another.state, state.another end
  if state.is_stale then extend(key, expiry(quota.algorithm.counts_until(state, quota))) end
end

local function add_reply(...)
  replied = replied + 1
  reply[replied] = pack('<' .. string.rep('d', select('#', ...)), ...)
end

-- Adds numbers to the reply. A request writes only when its reply is complete, so that one whose
-- stored value leads to wrong numbers has written nothing.
local function answer(...)
  for i = 1, select('#', ...) do
    if not is_time(select(i, ...)) then error('it leads to a wrong number') end
  end
  add_reply(...)
end

-- Decides equal acquires with one read and one write: grants as many as fit. Or decides a peek.
local function grant(key, cost, times, spends, ...)
  local quota = new_quota(...)
  local algorithm = quota.algorithm
  local state = load(key, quota)
  local remaining = algorithm.remaining(state, quota)
  local granted = math.min(times, floor(remaining / cost))
  answer(granted, remaining)
  if algorithm.snapshot then answer(algorithm.snapshot(state, quota)) end
  if spends and granted > 0 then
    -- The denied acquires come after the grants, so their state includes them.
    algorithm.spend(state, quota, granted * cost)
    state.another = nil
  end
  if granted < times then answer(times_of_denial(state, quota, cost, 0)) end
  if not spends then return end
  if granted > 0 then
    save(key, state, quota)
  elseif state.stepped_back then
    algorithm.spend(state, quota, 0)
    save(key, state, quota)
  else
    keep_alive(key, state, quota)
  end
end

local ACQUIRE, PEEK, REFUND, RESET, CHARGE_UP_TO, REPORT, COUNT_DENIED = 1, 2, 3, 4, 5, 6, 7
local COMMIT, RENEW = 8, 9

-- Answers with the current state, without a spend.
local function answer_unspent(charge)
  local algorithm, state, quota = charge.algorithm, charge.state, charge.quota
  answer(1, algorithm.remaining(state, quota), 0, reset_after(state, quota, 0), 0)
end

-- Writes a block. Without memory for it, its key is denied by its count.
local function save_block(block)
  work = work + 1
  local saved = try('SET', block.key, block.value, 'PXAT', block.expires_at)
  local failed = type(saved) == 'table' and saved.err
  if failed and not failed:find('OOM ', 1, true) then error(saved) end
end

-- Decides one charge. `all_fit`: every charge of this request fits. Returns what it has to write.
local function decide(charge, action, all_fit)
  local algorithm, state, quota, cost = charge.algorithm, charge.state, charge.quota, charge.cost
  local remaining, spend, block = charge.remaining, 0, charge.block
  local rest = math.max(block and block.rest or 0, charge.hold and charge.hold.rest or 0)
  if rest > 0 then
    answer(0, 0, rest, math.max(rest, reset_after(state, quota, 0)), 0)
    if block then block.is_written = block.is_changed and action ~= PEEK end
  elseif not charge.fits then
    if quota.count_denied then spend, remaining = cost, 0 end
    local wait, reset = times_of_denial(state, quota, cost, spend)
    -- The next calls return the units of further ended holds.
    if charge.hold and charge.hold.has_ended then wait = 1000 end
    if block and action ~= PEEK then
      -- Exceeds the limit: a block starts.
      wait, remaining, block.is_written = block.length, 0, true
      reset = math.max(reset, wait)
    end
    answer(0, remaining, wait, reset, 0)
  elseif all_fit then
    spend = cost
    -- A charge-up-to is for requests that were already served, so there is nothing to delay.
    local is_delayed = algorithm.delay and action ~= CHARGE_UP_TO
    local delay = is_delayed and algorithm.delay(state, quota) or 0
    answer(1, remaining - cost, 0, reset_after(state, quota, cost), delay)
  else
    answer_unspent(charge)
  end
  if action == PEEK then return nil end
  if spend == 0 and not state.stepped_back then return keep_alive end
  algorithm.spend(state, quota, spend)
  return save
end

-- Records units that were already used. Returns what it has to write.
local function report(charge)
  local algorithm, state, quota = charge.algorithm, charge.state, charge.quota
  local spend = math.max(0, math.min(charge.cost, quota.max_level - algorithm.level(state)))
  algorithm.spend(state, quota, spend)
  -- If there is nothing to record, a count of another algorithm stays as it is.
  if spend > 0 then state.another = nil end
  local retry_after, reset_after = 0
  if charge.fits then
    reset_after = algorithm.reset_after(state, quota, 0)
  else
    retry_after, reset_after = times_of_denial(state, quota, 1, 0)
  end
  local allowed = charge.fits and 1 or 0
  answer(allowed, algorithm.remaining(state, quota), retry_after, reset_after, 0)
  return (spend > 0 or state.stepped_back) and save or keep_alive
end

-- Returns units of an earlier charge. Returns what it has to write.
local function refund(charge)
  local algorithm, state = charge.algorithm, charge.state
  -- The units of another algorithm have lost their times.
  local has_units = not state.is_foreign and not algorithm.is_empty(state)
  if has_units then
    algorithm.refund(state, charge.quota, charge.cost, charge.since)
    state.is_refund = true
  end
  answer_unspent(charge)
  return has_units and save
end

local function group(header, from, to)
  local action, count, block_count, hold_count = unpack_struct('<dddd', header, 41)
  if action == RESET then
    call('UNLINK', unpack(keys, from, to))
    -- The sets of holds come last. Each remembers the reset as long as a record lives at most: of a
    -- hold until a minute after its end, of an id for ten minutes.
    local set = from + count + block_count
    for i = 1, hold_count do
      local at = 81 + 48 * count + 56 * (i - 1)
      local _, _, _, max_ttl, _, _, has_set = unpack_struct('<ddddddd', header, at)
      if has_set > 0 then
        local expires_at = expiry(now + math.max(max_ttl + 60000000, 600000000))
        -- Without memory for it, a late commit returns units of younger requests.
        if try('ZADD', keys[set], whole(4503599627370496 + now + resets), '*') == 1
          and try('PEXPIREAT', keys[set], expires_at) ~= 1 then
          call('UNLINK', keys[set])
        end
        set = set + 1
      end
    end
    resets = resets + 1
    return answer(1)
  end
  local holds, release_first, remember, renew, repeat_answer, settle
  if hold_count > 0 then
    include('hold.lua')
  end
  local charges, all_fit, given = {}, action ~= COUNT_DENIED, now
  for i = 1, count do
    local kind, limit, window, option, cost, since = unpack_struct('<dddddd', header, 33 + 48 * i)
    include('calendar.lua')
    local quota = new_quota(kind, limit, window, option)
    local algorithm, key = quota.algorithm, keys[from + i - 1]
    local state = load(key, quota)
    local remaining = algorithm.remaining(state, quota, cost)
    if action == CHARGE_UP_TO then cost = math.min(cost, remaining) end
    local fits = cost <= remaining
    -- A peek of cost 0 checks whether the recorded units exceed the limit.
    if action == PEEK and cost == 0 then fits = not algorithm.overdrawn(state, quota) end
    local hold = holds and holds[i]
    if hold then
      fits = hold.is_repeated or fits and not hold.rest
      state.hold = hold
    end
    all_fit = all_fit and fits
    if since < 0 then since = math.max(1, now + since) end
    charges[i] = {
      key = key, algorithm = algorithm, quota = quota, cost = cost, state = state,
      remaining = remaining, fits = fits, since = since, hold = hold,
    }
  end
  -- A count was ahead: all are decided at one time.
  if now > given then return group(header, from, to) end
  if block_count > 0 then
    include('block.lua')
  end
  for i = 1, count do
    local charge = charges[i]
    local hold, is_in_flight = charge.hold, charge.quota.kind == 8
    if action == COMMIT or action == REFUND and hold and hold.key then
      charge.write = settle(charge, action == REFUND)
    elseif action == RENEW then
      renew(charge)
    elseif is_in_flight and action == REFUND then
      release_first(charge)
    elseif is_in_flight and (action == REPORT or action == CHARGE_UP_TO) then
      answer_unspent(charge)
    elseif action == REPORT then
      charge.write = report(charge)
    elseif action == REFUND then
      charge.write = refund(charge)
    elseif hold and hold.is_repeated then
      repeat_answer(charge)
    else
      local is_bucket = charge.quota.kind == 6 or charge.quota.kind == 7
      local is_held = hold and hold.mode > 0 and action == ACQUIRE and all_fit
      local wait = is_held and is_bucket and reset_after(charge.state, charge.quota, 0) or 0
      charge.write = decide(charge, action, all_fit)
      if is_held then remember(charge, now + wait) end
    end
    if hold and hold.key then answer(hold.status or 0, hold.expires_after or 0) end
  end
  for i = 1, count > 1 and count or 0 do
    local charge = charges[i]
    if charge.write == save then prepare(charge.key, charge.state, charge.quota) end
  end
  for i = 1, count do
    local charge = charges[i]
    local hold = charge.hold
    if hold and hold.writes_first then hold.write() end
    if charge.write then charge.write(charge.key, charge.state, charge.quota) end
    if charge.block and charge.block.is_written then save_block(charge.block) end
    if hold and hold.write and not hold.writes_first then hold.write() end
  end
end

-- Deletes the counts of a request that failed because the user may not run PEXPIREAT, if they were
-- written without a TTL. The server refuses it for a missing key, too.
local function delete_without_ttl(from, to)
  if type(try('PEXPIREAT', keys[from] .. '\0', '1')) ~= 'table' then return end
  for i = from, to do
    if try('PTTL', keys[i]) == -1 then try('UNLINK', keys[i]) end
  end
end

-- Runs a request on these keys. If it fails, its reply is the error.
local function attempt(from, to, request, ...)
  local before, given, done, raised = replied, now, false, LATER
  before_request = work
  if work < MAX_WORK then done, raised = pcall(request, ...) end
  now = given
  if done then return end
  if raised ~= LATER then delete_without_ttl(from, to) end
  local text = type(raised) == 'table' and raised.err or tostring(raised)
  text = string.gsub(text, '^@user_script: %d+: %-', '') -- Redis 6 adds the position
  -- An error of Lua, not of a command: a value that the script cannot compute with.
  text = string.gsub(text, '^user_script:%d+: ', 'damaged value: ')
  for i = #reply, before + 1, -1 do reply[i] = nil end
  replied = before
  add_reply(-1, #text)
  reply[replied] = reply[replied] .. text
end

decide_slow = function(at, spends)
  attempt(at, at, grant, keys[at], cost, times, spends, kind, limit, window, option)
end
decide_group = function(header, from, to)
  attempt(from, to, group, header, from, to)
end
