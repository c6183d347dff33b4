-- wrk -s proxy_post.lua URL -- BODY KEYS TURNS SPREAD_MS
-- Plays sessions: each key of KEYS is an attempt that makes TURNS calls, one after the other. A call is BODY with
-- '@TURN@' replaced by the turn's mark (TURN-a, TURN-b, ...) and a text of its own; '@KEY@' in the URL's path
-- is replaced by the key. With
-- SPREAD_MS above 0 the connections start at random within that time, so that they do not call in step. Prints one
-- RESULT line.
local keys, before, after, turns = {}, "", "", 1
local calls, threads = 0, 0

function setup(thread)
  thread:set("id", threads)
  threads = threads + 1
end

function init(args)
  local f = assert(io.open(args[1], "rb"))
  local body = f:read("*a")
  f:close()
  local at, stop = body:find("@TURN@", 1, true)
  before, after = body:sub(1, at - 1), body:sub(stop + 1)
  local number = 0
  for line in io.lines(args[2]) do -- every thread has attempts of its own
    if number % 2 == id % 2 then keys[#keys + 1] = line end
    number = number + 1
  end
  turns = tonumber(args[3])
  math.randomseed(id + 1)
  local spread, started = tonumber(args[4]), 0
  if spread > 0 then
    function delay()
      started = started + 1
      return started <= 64 and math.random(0, spread) or 0
    end
  end
end

function request()
  local key, turn = keys[calls % #keys + 1], math.floor(calls / #keys) % turns
  calls = calls + 1
  local words = {}
  for i = 1, 120 do words[i] = string.format("%x", math.random(0, 0xffffff)) end
  local text = "TURN-" .. string.char(97 + turn) .. " " .. table.concat(words, " ")
  local headers = {["Content-Type"] = "application/json", ["Authorization"] = "Bearer " .. key}
  return wrk.format("POST", (wrk.path:gsub("@KEY@", key)), headers, before .. text .. after)
end

function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("RESULT %d %d %d %d %.0f %.0f\n", summary.requests, summary.duration,
    e.status + e.connect + e.read + e.write, e.timeout, latency:percentile(50), latency:percentile(99)))
end
