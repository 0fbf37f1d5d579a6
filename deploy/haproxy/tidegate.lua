-- http-request lua.tidegate URL: asks Tidegate's /v1/forward-auth about this request and sets
--   txn.tidegate          allowed or denied; not set if nobody decided
--   txn.ratelimit_policy, txn.ratelimit, txn.retry_after          its headers, for the client

local TIMEOUT = 1000 -- milliseconds
-- With auth.api_token:
local TOKEN = os.getenv("TIDEGATE_API_TOKEN")

-- About this connection, or set below.
local OURS = {
    ["connection"] = true, ["content-length"] = true, ["expect"] = true, ["host"] = true, ["keep-alive"] = true,
    ["te"] = true, ["trailer"] = true, ["transfer-encoding"] = true, ["upgrade"] = true,
    ["forwarded"] = true, ["x-forwarded-for"] = true, ["x-forwarded-host"] = true, ["x-forwarded-method"] = true,
    ["x-forwarded-uri"] = true, ["x-original-host"] = true, ["x-original-method"] = true, ["x-original-uri"] = true,
    ["x-original-url"] = true, ["x-tidegate-token"] = true,
}

local function question(txn)
    local headers = {}
    local host
    for name, values in pairs(txn.http:req_get_headers()) do
        if name == "host" then
            host = values[0]
        end
        if not OURS[name] then
            local list = {}
            for at = 0, #values do
                list[at + 1] = values[at]
            end
            headers[name] = list
        end
    end
    headers["x-forwarded-method"] = { txn.sf:method() }
    headers["x-forwarded-uri"] = { txn.sf:pathq() }
    headers["x-forwarded-for"] = { txn.sf:src() }
    headers["x-forwarded-host"] = host and { host }
    headers["x-tidegate-token"] = TOKEN and { TOKEN }
    return headers
end

core.register_action("tidegate", { "http-req" }, function(txn, url)
    local answer = core.httpclient():get { url = url, headers = question(txn), timeout = TIMEOUT }
    local status = answer and answer.status
    if status ~= 200 and status ~= 429 then
        return
    end
    txn:set_var("txn.tidegate", status == 200 and "allowed" or "denied")
    for variable, name in pairs { ratelimit_policy = "ratelimit-policy", ratelimit = "ratelimit", retry_after = "retry-after" } do
        local values = answer.headers[name]
        if values then
            txn:set_var("txn." .. variable, values[0])
        end
    end
end, 1)
