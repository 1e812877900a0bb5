--- What a server counts, in the text format of Prometheus (0.0.4).
local M = {}

---@class kvlab.http.Metrics
local Metrics = {}
Metrics.__index = Metrics

-- The upper ends of a histogram's buckets, in seconds.
local ENDS = { 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300 }

local HISTOGRAMS = {
  { "kvlab_time_to_first_token_seconds",
    "From the arrival of a request to its first token" },
  { "kvlab_request_seconds", "From the arrival of a request to the end of its answer" },
  { "kvlab_queue_seconds", "How long a request waited before it was computed" },
}
local COUNTERS = {
  { "kvlab_prompt_tokens_total", "Tokens of prompts" },
  { "kvlab_generated_tokens_total", "Tokens of answers" },
  { "kvlab_steps_total", "Steps of the model" },
  { "kvlab_disconnects_total",
    "Requests whose client left before their answer was complete" },
  { "kvlab_timeouts_total", "Requests that took longer than the server allows" },
}

---@return kvlab.http.Metrics
function M.new()
  local self = setmetatable({ counters = {}, histograms = {}, answers = {} }, Metrics)
  for _, one in ipairs(COUNTERS) do self.counters[one[1]] = 0 end
  for _, one in ipairs(HISTOGRAMS) do
    local h = { sum = 0, count = 0 }
    for i = 1, #ENDS do h[i] = 0 end
    self.histograms[one[1]] = h
  end
  return self
end

--- Adds to a counter.
function Metrics:add(name, n) self.counters[name] = self.counters[name] + (n or 1) end

--- Adds a value to a histogram.
function Metrics:observe(name, seconds)
  local h = self.histograms[name]
  h.sum, h.count = h.sum + seconds, h.count + 1
  for i = #ENDS, 1, -1 do
    if seconds > ENDS[i] then break end
    h[i] = h[i] + 1
  end
end

--- Counts an answer.
function Metrics:answered(path, status)
  local key = ('{path="%s",status="%d"}'):format(path, status)
  self.answers[key] = (self.answers[key] or 0) + 1
end

local function head(lines, name, words, kind)
  lines[#lines + 1] = ("# HELP %s %s"):format(name, words)
  lines[#lines + 1] = ("# TYPE %s %s"):format(name, kind)
end

local function put(lines, name, value)
  lines[#lines + 1] = ("%s %.17g"):format(name, value)
end

--- The text.
---@param gauges table[]  { name, words, value } of what is so now; value may be a list of
--                         { labels, value }
---@return string
function Metrics:text(gauges)
  local lines, keys = {}, {}
  head(lines, "kvlab_answers_total", "Answers by path and status", "counter")
  for key in pairs(self.answers) do keys[#keys + 1] = key end
  table.sort(keys)
  for _, key in ipairs(keys) do put(lines, "kvlab_answers_total" .. key,
    self.answers[key]) end
  for _, one in ipairs(COUNTERS) do
    head(lines, one[1], one[2], "counter")
    put(lines, one[1], self.counters[one[1]])
  end
  for _, one in ipairs(gauges) do
    head(lines, one[1], one[2], one[1]:find "_total$" and "counter" or "gauge")
    local values = type(one[3]) == "table" and one[3] or { { "", one[3] } }
    for _, value in ipairs(values) do put(lines, one[1] .. value[1], value[2]) end
  end
  for _, one in ipairs(HISTOGRAMS) do
    local name, h = one[1], self.histograms[one[1]]
    head(lines, name, one[2], "histogram")
    for i, last in ipairs(ENDS) do
      put(lines, ('%s_bucket{le="%g"}'):format(name, last), h[i])
    end
    put(lines, name .. '_bucket{le="+Inf"}', h.count)
    put(lines, name .. "_sum", h.sum)
    put(lines, name .. "_count", h.count)
  end
  return table.concat(lines, "\n") .. "\n"
end

return M
