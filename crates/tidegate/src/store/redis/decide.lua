-- Decides one or more independent requests, each of one or more charges, in one call at one time.
--
-- KEYS   one per charge, in the order of the charges; equal acquires share one
-- ARGV   1        time in microseconds for tests; '' in production, which uses the server's TIME
--        2        deadline in microseconds of the server's time, '' for none: a later call does
--                 nothing, because its caller has timed out
--        3        number of quotas
--        then for each quota: algorithm, limit, window (microseconds), option
--          option: burst of a bucket; 1 for a log that counts denied requests; else 0
--        then the requests, which refer to quotas by their number, each in one of three forms:
--          acquire-each <quota> <cost> <count>   <count> acquires of one charge, one for each of
--                                                the next <count> keys
--          acquire-times <quota> <cost> <times>  <times> equal acquires of one charge, all for
--                                                the next key
--          <action> <charges>, then for each charge: quota, cost
--            action   acquire | peek | reset | charge-up-to
--                     report: charges even beyond the limit, each charge separately
--                     refund: has a third argument per charge, the time of the original charge
--                       (microseconds of the server, or a little earlier; 0: unknown; negative:
--                       its age in microseconds)
--                     count-denied: an acquire that another node has already denied; spends
--                       nothing
--          Quotas that count denied requests occur only in the third form.
-- reply  the server's time in microseconds; then 1, or 0 if the deadline has passed, which ends
--          the reply
--        for each key of the first two forms: number of grants, units that remained before, the
--          algorithm's snapshot (from which the client computes each decision), and if some were
--          denied: their retry_after, reset_after (microseconds)
--        for the third form, per charge: allowed (1|0), remaining, retry_after, reset_after, delay
--          (microseconds); placeholders for a reset, whose result the client knows
--        A request that fails has its error text instead. If it is the only request, an error that
--          does not concern its key, such as OOM or READONLY, is raised.
--
-- An acquire of several charges is all or nothing: all are read and checked, then all are written,
-- or none. For example, one unit of 100 per minute for one key:
--   EVALSHA <sha> 1 rate_limit:{user123}:per-user '' 1700000000100000
--     1 sliding-log 100 60000000 0 acquire-each 1 1 1
--   -> 1700000000000250 1 1 100

if ARGV[2] ~= '' and server_time > tonumber(ARGV[2]) then return {server_time, 0} end

local reply, reply_len = {server_time, 1}, 2

local quotas, at, last, next_key = {}, 4, #ARGV, 1
for i = 1, tonumber(ARGV[3]) do
  local algorithm, option = algorithms[ARGV[at]], tonumber(ARGV[at + 3])
  -- The algorithms also keep numbers here that they format as text once per quota.
  quotas[i] = {
    name = ARGV[at],
    algorithm = algorithm,
    limit = tonumber(ARGV[at + 1]),
    window = tonumber(ARGV[at + 2]),
    option = option,
    count_denied = algorithm.supports_count_denied and option == 1,
    -- Recorded units are capped at ten times the capacity.
    max_level = math.min(10 * (algorithm.supports_count_denied and 0 or option), 1e12),
  }
  if quotas[i].max_level == 0 then quotas[i].max_level = math.min(10 * quotas[i].limit, 1e12) end
  at = at + 4
end

local function save(key, state, quota)
  if quota.algorithm.is_empty(state) then
    call('UNLINK', key)
  else
    quota.algorithm.save(key, state, quota)
  end
end

-- Returns the alternative key of an algorithm's count, for a key that another algorithm uses. It
-- cannot be the key of another count.
local function alternative_key(key, alt_suffix)
  return (string.gsub(key, '}:', '}%%' .. alt_suffix .. ':', 1))
end

-- Returns the state of a count, and its key. If the key holds a count of another algorithm, both
-- are kept: during a rollout instances use both algorithms, and if each overwrote the other's
-- count, no request would be denied. An alternative count stays in use until it expires.
local function load(key, quota)
  local algorithm = quota.algorithm
  local state = algorithm.load(key, quota)
  if state.other_type or state.absent then
    local alternative = alternative_key(key, algorithm.alt_suffix)
    local alternative_state = algorithm.load(alternative, quota)
    if state.other_type or not alternative_state.absent then
      return alternative_state, alternative
    end
  end
  return state, key
end

-- Extends the expiry of a count, which a longer window or a lower rate requires. A denied request
-- writes nothing else, unless its denial counts or the clock stepped back.
local function keep_alive(key, state, quota)
  local ttl = call('PTTL', key)
  if ttl == -2 then return end
  local expires_at = expiry(quota.algorithm.counts_until(state, quota))
  if ttl == -1 or floor(server_time / 1000) + ttl < expires_at - 1 then
    call('PEXPIREAT', key, expires_at)
  end
  if quota.algorithm.extend then quota.algorithm.extend(key, state, quota) end
end

-- Decides equal acquires with one read and one write: grants as many as fit.
local function grant(key, quota, cost, times)
  local algorithm, state = quota.algorithm, nil
  state, key = load(key, quota)
  local remaining = algorithm.remaining(state, quota)
  local granted
  if times == 1 then
    granted = cost <= remaining and 1 or 0
  else
    granted = math.min(times, floor(remaining / cost))
  end
  reply[reply_len + 1], reply[reply_len + 2] = granted, remaining
  reply_len = reply_len + 2
  if algorithm.snapshot then reply_len = algorithm.snapshot(state, quota, reply, reply_len) end
  if granted > 0 then
    algorithm.spend(state, quota, granted * cost)
    algorithm.save(key, state, quota)
    if granted == times then return end
    -- The denied acquires come after the grants, so their state includes them.
    state = algorithm.load(key, quota)
  end
  reply[reply_len + 1] = algorithm.retry_after(state, quota, cost, 0)
  reply[reply_len + 2] = algorithm.reset_after(state, quota, 0)
  reply_len = reply_len + 2
  if state.stepped_back then
    algorithm.spend(state, quota, 0)
    save(key, state, quota)
  else
    keep_alive(key, state, quota)
  end
end

-- Returns the function that decides a request of the third form. It is created only when needed,
-- because Lua would create all of these functions in every call.
local function make_decide_group()
  local function answer(allowed, remaining, retry_after, reset_after, delay)
    reply[reply_len + 1], reply[reply_len + 2] = allowed, remaining
    reply[reply_len + 3], reply[reply_len + 4] = retry_after, reset_after
    reply[reply_len + 5] = delay
    reply_len = reply_len + 5
  end

  -- Answers with the current state, without a spend.
  local function answer_unspent(charge)
    local algorithm, state, quota = charge.algorithm, charge.state, charge.quota
    answer(1, algorithm.remaining(state, quota), 0, algorithm.reset_after(state, quota, 0), 0)
  end

  -- Decides one charge. `all_fit`: every charge of this request fits.
  local function decide(charge, action, all_fit)
    local algorithm, state, quota, cost = charge.algorithm, charge.state, charge.quota, charge.cost
    local remaining, spend = charge.remaining, 0
    if not charge.fits then
      if quota.count_denied then spend, remaining = cost, 0 end
      local retry_after = algorithm.retry_after(state, quota, cost, spend)
      answer(0, remaining, retry_after, algorithm.reset_after(state, quota, spend), 0)
    elseif all_fit then
      spend = cost
      -- A charge-up-to is for requests that were already served, so there is nothing to delay.
      local is_delayed = algorithm.delay and action ~= 'charge-up-to'
      local delay = is_delayed and algorithm.delay(state, quota) or 0
      answer(1, remaining - cost, 0, algorithm.reset_after(state, quota, cost), delay)
    else
      answer_unspent(charge)
    end
    if action == 'peek' then return end
    if spend > 0 or state.stepped_back then
      algorithm.spend(state, quota, spend)
      save(charge.key, state, quota)
    else
      keep_alive(charge.key, state, quota)
    end
  end

  -- Records units that were already used.
  local function report(charge)
    local algorithm, state, quota = charge.algorithm, charge.state, charge.quota
    local spend = math.max(0, math.min(charge.cost, quota.max_level - algorithm.level(state)))
    algorithm.spend(state, quota, spend)
    local retry_after = charge.fits and 0 or algorithm.retry_after(state, quota, 1, 0)
    local allowed = charge.fits and 1 or 0
    local reset_after = algorithm.reset_after(state, quota, 0)
    answer(allowed, algorithm.remaining(state, quota), retry_after, reset_after, 0)
    if spend > 0 or state.stepped_back then
      save(charge.key, state, quota)
    else
      keep_alive(charge.key, state, quota)
    end
  end

  -- `at` and `key`: indices of the request's first argument and first key.
  return function(action, count, at, key)
    local charges, all_fit = {}, action ~= 'count-denied'
    for i = 1, count do
      local quota = quotas[tonumber(ARGV[at])]
      local algorithm = quota.algorithm
      local cost = tonumber(ARGV[at + 1])
      local charge = {key = KEYS[key], algorithm = algorithm, quota = quota, cost = cost}
      if action ~= 'reset' then
        charge.state, charge.key = load(charge.key, quota)
        charge.remaining = algorithm.remaining(charge.state, quota)
        if action == 'charge-up-to' then charge.cost = math.min(charge.cost, charge.remaining) end
        charge.fits = charge.cost <= charge.remaining
        -- A peek of cost 0 checks whether the recorded units exceed the limit.
        if action == 'peek' and charge.cost == 0 then
          charge.fits = not algorithm.overdrawn(charge.state, quota)
        end
        all_fit = all_fit and charge.fits
      end
      if action == 'refund' then
        charge.since, at = tonumber(ARGV[at + 2]), at + 1
        if charge.since < 0 then charge.since = math.max(1, now + charge.since) end
      end
      charges[i] = charge
      key, at = key + 1, at + 2
    end
    for i = 1, count do
      local charge = charges[i]
      if action == 'reset' then
        -- Delete the counts of all algorithms.
        local keys = {charge.key}
        for _, alt_suffix in ipairs({'log', 'packed', 'counter', 'window', 'bucket'}) do
          keys[#keys + 1] = alternative_key(charge.key, alt_suffix)
        end
        call('UNLINK', unpack(keys))
        answer(1, 0, 0, 0, 0)
      elseif action == 'report' then
        report(charge)
      elseif action == 'refund' then
        if not charge.algorithm.is_empty(charge.state) then
          charge.algorithm.refund(charge.key, charge.state, charge.quota, charge.cost, charge.since)
          save(charge.key, charge.state, charge.quota)
        end
        answer_unspent(charge)
      else
        decide(charge, action, all_fit)
      end
    end
  end
end

-- State of the loop: start of the current request's reply, and the acquires of an acquire-each that
-- are left. It moves past a request before the request is decided, so that after an error the loop
-- can continue with the next one.
local reply_start, each_left, quota, cost, decide_group = reply_len, 0, nil, nil, nil
local function decide_rest()
  while true do
    reply_start = reply_len
    if each_left > 0 then
      each_left, next_key = each_left - 1, next_key + 1
      grant(KEYS[next_key - 1], quota, cost, 1)
    elseif at > last then
      return
    else
      local action = ARGV[at]
      if action == 'acquire-each' then
        quota, cost = quotas[tonumber(ARGV[at + 1])], tonumber(ARGV[at + 2])
        each_left = tonumber(ARGV[at + 3])
        at = at + 4
      elseif action == 'acquire-times' then
        at, next_key = at + 4, next_key + 1
        local times_quota = quotas[tonumber(ARGV[at - 3])]
        grant(KEYS[next_key - 1], times_quota, tonumber(ARGV[at - 2]), tonumber(ARGV[at - 1]))
      else
        local count, from, key = tonumber(ARGV[at + 1]), at + 2, next_key
        at, next_key = from + (action == 'refund' and 3 or 2) * count, key + count
        decide_group = decide_group or make_decide_group()
        decide_group(action, count, from, key)
      end
    end
  end
end

-- Whether the server refuses requests for any key with this error.
local function is_server_condition(text)
  local codes = {
    'READONLY', 'OOM', 'MISCONF', 'NOPERM', 'NOREPLICAS', 'CLUSTERDOWN', 'MASTERDOWN',
  }
  for _, code in ipairs(codes) do
    if text:find(code .. ' ', 1, true) then return true end
  end
end

while true do
  local before = at + next_key
  local done, failure = pcall(decide_rest)
  if done then return reply end
  -- The arguments are malformed, so the next request cannot be found.
  if at + next_key == before then error(failure, 0) end
  local text = type(failure) == 'table' and failure.err or tostring(failure)
  local is_only_request = reply_start == 2 and each_left == 0 and at > last
  if is_only_request and is_server_condition(text) then error(failure, 0) end
  for i = #reply, reply_start + 2, -1 do reply[i] = nil end
  reply_len = reply_start + 1
  reply[reply_len] = text
end
