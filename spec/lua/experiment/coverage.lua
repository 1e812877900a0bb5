--- How often an interval of kvlab.statistics holds the truth: the share of drawn samples
-- where it does. statistics_spec.lua holds it to bounds, tools/coverage.lua prints it.
local statistics = require "kvlab.experiment.statistics"
local uniform = require "kvlab.tensor.uniform"

local M = {}

local function clamped(values) -- Student's t, as scores had it
  local mean, low, high = statistics.interval(values)
  return mean, low and math.max(low, 0), high and math.min(high, 1)
end

M.t, M.share, M.difference = clamped, statistics.share, statistics.difference
M.t_difference = statistics.interval

--- Draws `samples` samples and returns the share whose interval holds `truth`, and the
-- share of intervals without width.
---@param interval fun(values: number[]): number, number, number
---@param draw fun(uniform: fun(): number): number[]
---@return number inside, number flat
function M.of(interval, draw, truth, samples)
  local uniforms, inside, flat = uniform.generator(1), 0, 0
  for _ = 1, samples do
    local _, low, high = interval(draw(uniforms))
    if low <= truth + 1e-12 and truth - 1e-12 <= high then inside = inside + 1 end
    if high - low < 1e-12 then flat = flat + 1 end
  end
  return inside / samples, flat / samples
end

--- n texts, each answered right with probability p: 0/1 scores.
function M.texts(n, p)
  return function(draw)
    local values = {}
    for i = 1, n do values[i] = draw() < p and 1 or 0 end
    return values
  end
end

--- n texts under two policies: only the first is right with probability p, only the
-- second with q.
function M.pairs_of_texts(n, p, q)
  return function(draw)
    local values = {}
    for i = 1, n do
      local u = draw()
      values[i] = u < p and 1 or u < p + q and -1 or 0
    end
    return values
  end
end

--- n seeds of `groups` contexts with `trials` questions each. A share `same` of the
-- questions of a context has one outcome for all of them.
function M.seeds(n, p, groups, trials, same)
  return function(draw)
    local values = {}
    for i = 1, n do
      local right = 0
      for _ = 1, groups do
        local all = draw() < p and 1 or 0
        for _ = 1, trials do
          right = right + (draw() < same and all or draw() < p and 1 or 0)
        end
      end
      values[i] = right / (groups * trials)
    end
    return values
  end
end

return M
