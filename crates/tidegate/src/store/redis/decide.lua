-- Decides one or more independent requests, each of one or more charges: one TIME, one call.
--
-- KEYS   one a charge, in the order of the charges
-- ARGV   1        the time in microseconds, from tests only; '' in production: the server's TIME
--        2        the server's time in microseconds after which nothing is done any more: by then the caller has gone,
--                 and what is spent for it is lost; '' for none
--        then, for each request:
--          action   acquire | peek | refund | reset | take
--                   forgo: as acquire, when a charge on another node has denied, so nothing is spent
--          charges  how many charges follow
--          then, for each charge: algorithm, limit, window (microseconds), option, cost
--          option is a bucket's burst; 1 for a log that counts denied requests, else 0
-- reply  the server's time in microseconds; 1, or 0 if it was too late, and nothing was done: then that is all
--        then five integers a charge: allowed (1|0), remaining, retry_after, reset_after, delay (microseconds)
--        (for a reset they say nothing: the caller knows what a forgotten key has left)
--
-- The charges of one acquire are all or nothing: all are read and asked, then all are written or none.
-- For example, one unit of 100 a minute for one key:
--   EVALSHA <sha> 1 rate_limit:{user123}:per-user '' 1700000000100000 acquire 1 sliding-log 100 60000000 0 1
--   -> 1700000000000250 1 1 99 0 60000000 0

if ARGV[2] ~= '' and server_time > tonumber(ARGV[2]) then return {server_time, 0} end

local reply, replied = {server_time, 1}, 2

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

local function save(charge)
  if charge.algorithm.is_empty(charge.state) then
    call('DEL', charge.key)
  else
    charge.algorithm.save(charge.key, charge.state, charge.quota)
  end
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
    save(charge)
  end
end

local next_key, at, last = 1, 3, #ARGV
while at <= last do
  local action, count = ARGV[at], tonumber(ARGV[at + 1])
  at = at + 2
  local charges, together = {}, action ~= 'forgo'
  for i = 1, count do
    local name, option = ARGV[at], tonumber(ARGV[at + 3])
    local algorithm = algorithms[name]
    local quota = {
      limit = tonumber(ARGV[at + 1]),
      window = tonumber(ARGV[at + 2]),
      option = option,
      count_denied = algorithm.counts_denied and option == 1,
    }
    local charge = {key = KEYS[next_key], algorithm = algorithm, quota = quota, cost = tonumber(ARGV[at + 4])}
    if action ~= 'reset' then
      charge.state = algorithm.load(charge.key, quota)
      charge.remaining = algorithm.remaining(charge.state, quota)
      if action == 'take' then charge.cost = math.min(charge.cost, charge.remaining) end
      together = together and charge.cost <= charge.remaining
    end
    charges[i] = charge
    next_key, at = next_key + 1, at + 5
  end
  for i = 1, count do
    local charge = charges[i]
    if action == 'reset' then
      call('DEL', charge.key)
      answer(1, 0, 0, 0, 0)
    elseif action == 'refund' then
      if not charge.algorithm.is_empty(charge.state) then
        charge.algorithm.refund(charge.state, charge.quota, charge.cost)
        save(charge)
      end
      answer_unspent(charge)
    else
      decide(charge, action, together)
    end
  end
end
return reply
