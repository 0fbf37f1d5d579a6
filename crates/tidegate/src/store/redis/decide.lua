-- Decides one or more independent requests, each of one or more charges: one TIME, one call.
--
-- KEYS   one a charge, in the order of the charges; equal requests share theirs
-- ARGV   1        the time in microseconds, from tests only; '' in production: the server's TIME
--        2        the server's time in microseconds after which nothing is done any more: by then the caller has gone,
--                 and what is spent for it is lost; '' for none
--        3        how many quotas follow
--        then, for each quota: algorithm, limit, window (microseconds), option
--          option is a bucket's burst; 1 for a log that counts denied requests, else 0
--        then the requests, which name quotas by their number, in one of three forms:
--          acquire-each <quota> <cost> <count>   so many acquires of one charge, each of the next key
--          acquire-times <quota> <cost> <times>  so many equal acquires of one charge, all of the next key
--          <action> <charges>, then for each charge: quota, cost
--            action   acquire | peek | reset | take
--                     report: charges even beyond the limit, each charge on its own
--                     refund: three arguments a charge: quota, cost, and when it was charged (server's microseconds, or a
--                     little earlier; 0: unknown; negative: how long ago, in microseconds)
--                     forgo: as acquire, when a charge on another node has denied, so nothing is spent
--          (quotas that count denied requests only in the third)
-- reply  the server's time in microseconds; 1, or 0 if it was too late, and nothing was done: then that is all
--        then for each key of the first two forms: how many were granted, what remained before, the algorithm's snapshot (from
--          which follows what each was told), and if some were denied: their retry_after, reset_after (microseconds)
--        and for the third, five integers a charge: allowed (1|0), remaining, retry_after, reset_after, delay (microseconds)
--          (for a reset they say nothing: the caller knows what a forgotten key has left)
--        A request that met an error has its text instead. An error that is not about its key, such as OOM or READONLY, is
--          raised if there is no other request.
--
-- The charges of one acquire are all or nothing: all are read and asked, then all are written or none.
-- For example, one unit of 100 a minute for one key:
--   EVALSHA <sha> 1 rate_limit:{user123}:per-user '' 1700000000100000 1 sliding-log 100 60000000 0 acquire-each 1 1 1
--   -> 1700000000000250 1 1 100

if ARGV[2] ~= '' and server_time > tonumber(ARGV[2]) then return {server_time, 0} end

local reply, replied = {server_time, 1}, 2

local quotas, at, last, next_key = {}, 4, #ARGV, 1
for i = 1, tonumber(ARGV[3]) do
  local algorithm, option = algorithms[ARGV[at]], tonumber(ARGV[at + 3])
  quotas[i] = {
    name = ARGV[at],
    algorithm = algorithm,
    limit = tonumber(ARGV[at + 1]),
    window = tonumber(ARGV[at + 2]),
    option = option,
    count_denied = algorithm.counts_denied and option == 1,
    -- The most that can be recorded: ten times the capacity.
    max_level = math.min(10 * (algorithm.counts_denied and 0 or option), 1e12),
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

-- The key of an algorithm's count where another algorithm counts under the key itself. No key of a count has this form.
local function key_beside(key, algorithm)
  return (string.gsub(key, '}:', '}%%' .. algorithm.alt_suffix .. ':', 1))
end

-- The state of a key, and where it is kept. Where another algorithm counts, it goes on undisturbed, and this one counts beside
-- it: while a new configuration is rolled out some instances still go by the old one, and if each forgot what the other has
-- counted, no request would be denied. A count that is there goes on when the one beside it has expired.
local function load(key, quota)
  local algorithm = quota.algorithm
  local state = algorithm.load(key, quota)
  if state.other_type or state.absent then
    local beside = key_beside(key, algorithm)
    local other = algorithm.load(beside, quota)
    if state.other_type or not other.absent then return other, beside end
  end
  return state, key
end

-- A denied request writes nothing. But under a quota with a longer window, or a slower one, the count has to live longer.
local function keep_alive(key, state, quota)
  local left = call('PTTL', key)
  if left == -2 then return end
  local expires = expiry(quota.algorithm.counts_until(state, quota))
  if left == -1 or floor(server_time / 1000) + left < expires - 1 then call('PEXPIREAT', key, expires) end
  if quota.algorithm.extend then quota.algorithm.extend(key, state, quota) end
end

-- Grants as many of these equal acquires as there is room for: read once, written once.
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
  reply[replied + 1], reply[replied + 2] = granted, remaining
  replied = replied + 2
  if algorithm.snapshot then replied = algorithm.snapshot(state, quota, reply, replied) end
  if granted > 0 then
    algorithm.spend(state, quota, granted * cost)
    algorithm.save(key, state, quota)
    if granted == times then return end
    -- What is denied after a grant finds it in the count.
    state = algorithm.load(key, quota)
  end
  reply[replied + 1] = algorithm.retry_after(state, quota, cost, 0)
  reply[replied + 2] = algorithm.reset_after(state, quota, 0)
  replied = replied + 2
  if state.stepped_back then
    algorithm.spend(state, quota, 0)
    save(key, state, quota)
  else
    keep_alive(key, state, quota)
  end
end

-- Decides the charges of one request, from this argument and this key on. Lua makes functions anew at every call, so these
-- only when they are needed.
local function make_together()
  local function answer(allowed, remaining, retry_after, reset_after, delay)
    reply[replied + 1], reply[replied + 2], reply[replied + 3] = allowed, remaining, retry_after
    reply[replied + 4], reply[replied + 5] = reset_after, delay
    replied = replied + 5
  end

  -- What is left when nothing is taken.
  local function answer_unspent(charge)
    local algorithm, state, quota = charge.algorithm, charge.state, charge.quota
    answer(1, algorithm.remaining(state, quota), 0, algorithm.reset_after(state, quota, 0), 0)
  end

  -- `together`: every charge of this request fits.
  local function decide(charge, action, together)
    local algorithm, state, quota, cost = charge.algorithm, charge.state, charge.quota, charge.cost
    local remaining, spend = charge.remaining, 0
    if not charge.fits then
      if quota.count_denied then spend, remaining = cost, 0 end
      answer(0, remaining, algorithm.retry_after(state, quota, cost, spend), algorithm.reset_after(state, quota, spend), 0)
    elseif together then
      spend = cost
      -- What is taken afterwards has had its turn.
      local delay = algorithm.delay and action ~= 'take' and algorithm.delay(state, quota) or 0
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

  -- Records units that were used already.
  local function report(charge)
    local algorithm, state, quota = charge.algorithm, charge.state, charge.quota
    local spend = math.max(0, math.min(charge.cost, quota.max_level - algorithm.level(state)))
    algorithm.spend(state, quota, spend)
    local retry_after = charge.fits and 0 or algorithm.retry_after(state, quota, 1, 0)
    answer(charge.fits and 1 or 0, algorithm.remaining(state, quota), retry_after, algorithm.reset_after(state, quota, 0), 0)
    if spend > 0 or state.stepped_back then
      save(charge.key, state, quota)
    else
      keep_alive(charge.key, state, quota)
    end
  end

  return function(action, count, at, key)
    local charges, together = {}, action ~= 'forgo'
    for i = 1, count do
      local quota = quotas[tonumber(ARGV[at])]
      local algorithm = quota.algorithm
      local charge = {key = KEYS[key], algorithm = algorithm, quota = quota, cost = tonumber(ARGV[at + 1])}
      if action ~= 'reset' then
        charge.state, charge.key = load(charge.key, quota)
        charge.remaining = algorithm.remaining(charge.state, quota)
        if action == 'take' then charge.cost = math.min(charge.cost, charge.remaining) end
        charge.fits = charge.cost <= charge.remaining
        -- A peek of cost 0 asks whether more is recorded than the limit.
        if action == 'peek' and charge.cost == 0 then charge.fits = not algorithm.overdrawn(charge.state, quota) end
        together = together and charge.fits
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
        -- Every count of this key, by whichever algorithm.
        local keys = {charge.key}
        for _, alt_suffix in ipairs({'log', 'packed', 'counter', 'window', 'bucket'}) do
          keys[#keys + 1] = key_beside(charge.key, {alt_suffix = alt_suffix})
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
        decide(charge, action, together)
      end
    end
  end
end

-- `answered` is where the answer of the present request begins; `left` are those of an acquire-each that are still to be
-- asked. What stands out here has moved past a request before it is decided, so that the rest can be decided after an error.
local answered, left, quota, cost, together = replied, 0, nil, nil, nil
local function decide_rest()
  while true do
    answered = replied
    if left > 0 then
      left, next_key = left - 1, next_key + 1
      grant(KEYS[next_key - 1], quota, cost, 1)
    elseif at > last then
      return
    else
      local action = ARGV[at]
      if action == 'acquire-each' then
        quota, cost, left = quotas[tonumber(ARGV[at + 1])], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
        at = at + 4
      elseif action == 'acquire-times' then
        at, next_key = at + 4, next_key + 1
        grant(KEYS[next_key - 1], quotas[tonumber(ARGV[at - 3])], tonumber(ARGV[at - 2]), tonumber(ARGV[at - 1]))
      else
        local count, from, key = tonumber(ARGV[at + 1]), at + 2, next_key
        at, next_key = from + (action == 'refund' and 3 or 2) * count, key + count
        together = together or make_together()
        together(action, count, from, key)
      end
    end
  end
end

-- Whether an error says that the server refuses any request now, whatever its key.
local function is_of_server(text)
  for _, code in ipairs({'READONLY', 'OOM', 'MISCONF', 'NOPERM', 'NOREPLICAS', 'CLUSTERDOWN', 'MASTERDOWN'}) do
    if text:find(code .. ' ', 1, true) then return true end
  end
end

while true do
  local before = at + next_key
  local done, failure = pcall(decide_rest)
  if done then return reply end
  -- Arguments that make no request: the rest of them cannot be found.
  if at + next_key == before then error(failure, 0) end
  local text = type(failure) == 'table' and failure.err or tostring(failure)
  if answered == 2 and left == 0 and at > last and is_of_server(text) then error(failure, 0) end
  for i = #reply, answered + 2, -1 do reply[i] = nil end
  replied = answered + 1
  reply[replied] = text
end
