-- http-request lua.tidegate URL: asks Tidegate's /v1/forward-auth about this request. A denial is answered here, as Tidegate
-- says it. Otherwise it sets
--   txn.tidegate          allowed; not set if nobody decided: no answer, or a 5xx
--   txn.ratelimit_policy, txn.ratelimit          its headers, for the client

local TIMEOUT = 1000 -- milliseconds
-- With auth.api_token:
local TOKEN = os.getenv("TIDEGATE_API_TOKEN")

-- The client's headers that policies look at, by header.NAME or cookie.NAME, in lower case: add yours. Not all of them: what
-- asks, HAProxy's httpclient, has room for some dozens of headers, and 2.6 crashes on more.
local ASKED_WITH = { "authorization", "cookie", "user-agent", "x-api-key", "x-user-id" }

-- What a client is told with a denial.
local TOLD = {
    "content-type", "retry-after", "ratelimit-policy", "ratelimit",
    "x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset",
}

-- HAProxy counts values from 0. Several of one name become one, as policies see them anyway.
local function joined(values, name)
    local list = {}
    for at = 0, #values do
        list[at + 1] = values[at]
    end
    return { table.concat(list, name == "cookie" and "; " or ", ") }
end

local function question(txn)
    local given = txn.http:req_get_headers()
    local headers = {
        ["x-forwarded-method"] = { txn.sf:method() },
        ["x-forwarded-uri"] = { txn.sf:pathq() },
        ["x-forwarded-for"] = { txn.sf:src() },
        ["x-forwarded-host"] = given["host"] and { given["host"][0] },
        ["x-tidegate-token"] = TOKEN and { TOKEN },
    }
    for _, name in ipairs(ASKED_WITH) do
        headers[name] = given[name] and joined(given[name], name)
    end
    return headers
end

local function deny(txn, answer)
    local headers = {}
    for _, name in ipairs(TOLD) do
        headers[name] = answer.headers[name] and { answer.headers[name][0] }
    end
    local status = answer.status
    txn:done(txn:reply { status = status >= 400 and status or 400, headers = headers, body = answer.body })
end

core.register_action("tidegate", { "http-req" }, function(txn, url)
    local answer = core.httpclient():get { url = url, headers = question(txn), timeout = TIMEOUT }
    local status = answer and answer.status or 0
    if status == 0 or status >= 500 then
        return
    end
    if status ~= 200 then
        return deny(txn, answer)
    end
    txn:set_var("txn.tidegate", "allowed")
    for variable, name in pairs { ratelimit_policy = "ratelimit-policy", ratelimit = "ratelimit" } do
        local values = answer.headers[name]
        if values then
            txn:set_var("txn." .. variable, values[0])
        end
    end
end, 1)
