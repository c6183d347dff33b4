-- wrk -s proxy_post.lua URL -- BODY KEYS UNIQUE
-- Posts BODY under the next key of KEYS; with UNIQUE=1 each request's '@TURN@' is a text of its own, as in a session
-- that goes on. Prints one RESULT line.
local keys, before, after, unique = {}, "", "", false
local turn, thread_count = 0, 0

function setup(thread)
  thread:set("id", thread_count)
  thread_count = thread_count + 1
end

function init(args)
  local f = assert(io.open(args[1], "rb"))
  local body = f:read("*a")
  f:close()
  local at, stop = body:find("@TURN@", 1, true)
  before, after = body:sub(1, at - 1), body:sub(stop + 1)
  for line in io.lines(args[2]) do keys[#keys + 1] = line end
  unique = args[3] == "1"
  turn = id * 1000003
  math.randomseed(id + 1)
end

function request()
  turn = turn + 1
  local text = "turn"
  if unique then
    local words = {}
    for i = 1, 120 do words[i] = string.format("%x", math.random(0, 0xffffff)) end
    text = turn .. " " .. table.concat(words, " ")
  end
  local headers = {["Content-Type"] = "application/json", ["Authorization"] = "Bearer " .. keys[turn % #keys + 1]}
  return wrk.format("POST", nil, headers, before .. text .. after)
end

function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("RESULT %d %d %d %d %.0f %.0f %.0f\n", summary.requests, summary.duration,
    e.status + e.connect + e.read + e.write, e.timeout, latency:percentile(50), latency:percentile(99), latency.max))
end
