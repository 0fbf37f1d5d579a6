-- http-request lua.tidegate URL: asks Tidegate's /v1/forward-auth about this request. For a denial,
-- the client gets the answer of Tidegate. Otherwise the action sets
--   txn.tidegate                         "allowed"; not set without a decision (no answer, a 5xx)
--   txn.ratelimit_policy, txn.ratelimit  headers of the answer, for the client

local TIMEOUT = 1000 -- milliseconds
-- With auth.api_token:
local TOKEN = os.getenv("TIDEGATE_API_TOKEN")

-- Headers of the client that policies use, as header.NAME or cookie.NAME, in lower case; add yours.
-- Do not forward all of them: HAProxy's httpclient supports some dozens, and 2.6 crashes on more.
local FORWARDED_HEADERS = { "authorization", "cookie", "user-agent", "x-api-key", "x-user-id" }

-- Headers of a denial that the client gets.
local DENIAL_HEADERS = {
    "content-type", "retry-after", "ratelimit-policy", "ratelimit",
    "x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset",
}

-- Joins the values of a header, which HAProxy numbers from 0. Policies see them joined, too.
local function join_values(values, name)
    local list = {}
    for at = 0, #values do
        list[at + 1] = values[at]
    end
    return { table.concat(list, name == "cookie" and "; " or ", ") }
end

local function request_headers(txn)
    local given = txn.http:req_get_headers()
    local headers = {
        ["x-forwarded-method"] = { txn.sf:method() },
        ["x-forwarded-uri"] = { txn.sf:pathq() },
        ["x-forwarded-for"] = { txn.sf:src() },
        ["x-forwarded-host"] = given["host"] and { given["host"][0] },
        ["x-tidegate-token"] = TOKEN and { TOKEN },
    }
    for _, name in ipairs(FORWARDED_HEADERS) do
        headers[name] = given[name] and join_values(given[name], name)
    end
    return headers
end

local function deny(txn, answer)
    local headers = {}
    for _, name in ipairs(DENIAL_HEADERS) do
        headers[name] = answer.headers[name] and { answer.headers[name][0] }
    end
    local status = answer.status
    status = status >= 400 and status or 400
    txn:done(txn:reply { status = status, headers = headers, body = answer.body })
end

core.register_action("tidegate", { "http-req" }, function(txn, url)
    local headers = request_headers(txn)
    local answer = core.httpclient():get { url = url, headers = headers, timeout = TIMEOUT }
    local status = answer and answer.status or 0
    if status == 0 or status >= 500 then
        return
    end
    if status ~= 200 then
        return deny(txn, answer)
    end
    txn:set_var("txn.tidegate", "allowed")
    local variables = { ratelimit_policy = "ratelimit-policy", ratelimit = "ratelimit" }
    for variable, name in pairs(variables) do
        local values = answer.headers[name]
        if values then
            txn:set_var("txn." .. variable, values[0])
        end
    end
end, 1)
