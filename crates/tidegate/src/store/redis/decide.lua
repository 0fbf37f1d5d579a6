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
--            action   acquire | peek | refund | reset | take
--                     forgo: as acquire, when a charge on another node has denied, so nothing is spent
--          (quotas that count denied requests only in the third)
-- reply  the server's time in microseconds; 1, or 0 if it was too late, and nothing was done: then that is all
--        then for each key of the first two forms: how many were granted, what remained before, the algorithm's evidence (from
--          which follows what each was told), and if some were denied: their retry_after, reset_after (microseconds)
--        and for the third, five integers a charge: allowed (1|0), remaining, retry_after, reset_after, delay (microseconds)
--          (for a reset they say nothing: the caller knows what a forgotten key has left)
--        Of several requests, one that met an error has its text instead; a single one raises it.
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
  }
  at = at + 4
end

local function save(key, state, quota)
  if quota.algorithm.is_empty(state) then
    call('DEL', key)
  else
    quota.algorithm.save(key, state, quota)
  end
end

-- The state of a key, and where it is kept. Where another algorithm counts, it goes on undisturbed, and this one counts beside
-- it: while a new configuration is rolled out some instances still go by the old one, and if each forgot what the other has
-- counted, nobody would be denied. What is not counted on expires.
local function load(key, quota)
  local algorithm = quota.algorithm
  local state = algorithm.load(key, quota)
  if state.foreign then
    key = key .. ':' .. algorithm.aside
    state = algorithm.load(key, quota)
  end
  return state, key
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
  if algorithm.evidence then replied = algorithm.evidence(state, quota, reply, replied) end
  if granted > 0 then
    algorithm.spend(state, quota, granted * cost)
    algorithm.save(key, state, quota)
    if granted == times then return end
    -- What is denied after a grant finds it in the count.
    state = algorithm.load(key, quota)
  end
  reply[replied + 1] = algorithm.retry_after(state, quota, cost)
  reply[replied + 2] = algorithm.reset_after(state, quota, 0)
  replied = replied + 2
  if state.stepped_back or state.short_lived then
    algorithm.spend(state, quota, 0)
    save(key, state, quota)
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
    if cost > remaining then
      if quota.count_denied then spend, remaining = cost, 0 end
      answer(0, remaining, algorithm.retry_after(state, quota, cost), algorithm.reset_after(state, quota, spend), 0)
    elseif together then
      spend = cost
      -- What is taken afterwards has had its turn.
      local delay = algorithm.delay and action ~= 'take' and algorithm.delay(state, quota) or 0
      answer(1, remaining - cost, 0, algorithm.reset_after(state, quota, cost), delay)
    else
      answer_unspent(charge)
    end
    -- Two things are written though nothing is spent: that a clock stepped back, and that a key must live longer.
    if action ~= 'peek' and (spend > 0 or state.stepped_back or state.short_lived) then
      algorithm.spend(state, quota, spend)
      save(charge.key, state, quota)
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
        together = together and charge.cost <= charge.remaining
      end
      charges[i] = charge
      key, at = key + 1, at + 2
    end
    for i = 1, count do
      local charge = charges[i]
      if action == 'reset' then
        local key = charge.key .. ':'
        call('DEL', charge.key, key .. 'log', key .. 'packed', key .. 'counter', key .. 'window', key .. 'bucket')
        answer(1, 0, 0, 0, 0)
      elseif action == 'refund' then
        if not charge.algorithm.is_empty(charge.state) then
          charge.algorithm.refund(charge.state, charge.quota, charge.cost)
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
        at, next_key = from + 2 * count, key + count
        together = together or make_together()
        together(action, count, from, key)
      end
    end
  end
end

while true do
  local done, trouble = pcall(decide_rest)
  if done then return reply end
  if answered == 2 and left == 0 and at > last then error(trouble, 0) end
  for i = #reply, answered + 2, -1 do reply[i] = nil end
  replied = answered + 1
  reply[replied] = type(trouble) == 'table' and trouble.err or tostring(trouble)
end
