--- A walk measures one kind of work at every point of a grid, and finds the cliffs: the
-- points that take much longer than the points beside them say they should.
--
-- A walk has axes, such as head_dim and the number of new tokens, and a point has a
-- value on each axis. Two points are neighbours if they differ on one axis alone, and
-- there by a factor of at most REACH. Values that are words, such as formats, are all
-- neighbours.
--
-- Every point has a quantity of work: the microseconds in which the machine could do it,
-- bytes / R + flops / T. The point counts its bytes and flops; R and T are measured in
-- the same run. In the following, only the ratio of the work of two points matters.
--
-- A neighbour allows a point this time: as long as the neighbour takes, and longer in
-- proportion if the point does more work. So a point should take no longer than a
-- neighbour that does more work, and no longer for each unit of work than a neighbour
-- that does less. The trend at a point is the least time that a neighbour allows. The
-- point is a cliff if it takes more than STANDS_OUT times the trend. Four things follow:
--
--   - A spike stands out beside the two points around it.
--   - So does a whole plateau of slow shapes beside a fast one. If the head_dims 64 and
--     128 cost the same for each flop, the trend between them is a straight line, however
--     slow 72 … 120 all are. If every point of a walk is slow, it finds nothing.
--   - Each feature or format is compared with every other one, so all of them together
--     are also compared with none.
--   - The launch and the latency of memory make no cliff. They make small shapes dear for
--     each unit of work, but not slower than larger ones. The drawback is that a shape
--     with less work than all of its neighbours is judged mildly: it is a cliff only if
--     it takes longer than one of them.
--
-- Times below FLOOR_US count as that long, because so short a time is mostly the launch,
-- which changes from call to call. Each point is timed several times, and the shortest
-- counts: all else that the machine does can only add to it. A point that stands out is
-- measured again, up to LOOKS times, and so is the neighbour that it is compared with.
local kv = require "kvlab"

local M = { STANDS_OUT = 1.5 }

local REACH = 4
local FLOOR_US = { cpu = 50, cuda = 8 }
local MIB = 1024 * 1024
local READ = 256 * MIB -- bytes of the plain read that R is taken from

-- A look at a point times it for about so long, but between LEAST and MOST times. Caches
-- are emptied in between; on a CPU this reads less memory than other benches read for it.
local LOOK_US, LEAST, MOST, LOOKS = { cpu = 60e3, cuda = 100e3 }, 3, 31, 4
local FLUSH_CPU = 128 * MIB
local SETTLE_US = { cpu = 0, cuda = 20e3 }

-- ---- what is a cliff ------------------------------------------------------------------

local function are_near(a, b)
  if type(a) == "string" then return true end
  return math.max(a, b) <= REACH * math.min(a, b)
end

local function are_neighbours(axes, p, other)
  local differ = 0
  for _, axis in ipairs(axes) do
    local a, b = p.at[axis[1]], other.at[axis[1]]
    if a ~= b then
      if axis.apart or not are_near(a, b) then return false end
      differ = differ + 1
    end
  end
  return differ == 1
end

--- Sets for each point its trend_us, the neighbour `beside` that allows it no more, and
-- ratio, its time over the trend.
---@param axes table[]        as for Bench:walk
---@param points table[]      at: its values by the names of axes; work, us
---@param floor_us? number    times below count as that long (0)
---@return table[] cliffs     the points that stand out, the highest first
function M.judge(axes, points, floor_us)
  local cliffs = {}
  local function time(p) return math.max(p.us, floor_us or 0) end
  for _, p in ipairs(points) do
    p.trend_us, p.beside = math.huge, nil
    for _, other in ipairs(points) do
      local allowed = time(other) * math.max(1, p.work / other.work)
      if allowed < p.trend_us and are_neighbours(axes, p, other) then
        p.trend_us, p.beside = allowed, other
      end
    end
    p.ratio = p.beside and time(p) / p.trend_us or 0
    if p.ratio > M.STANDS_OUT then cliffs[#cliffs + 1] = p end
  end
  table.sort(cliffs, function(a, b) return a.ratio > b.ratio end)
  return cliffs
end

-- ---- measuring ------------------------------------------------------------------------

--- The points of a grid, the last axis fastest.
local function points_of(axes)
  local points = { { at = {} } }
  for _, axis in ipairs(axes) do
    local more = {}
    for _, p in ipairs(points) do
      for i = 2, #axis do
        local at = { [axis[1]] = axis[i] }
        for name, value in pairs(p.at) do at[name] = value end
        more[#more + 1] = { at = at }
      end
    end
    points = more
  end
  return points
end

local function name_of(axes, p)
  local words = {}
  for i, axis in ipairs(axes) do
    words[i] = ("%s %s"):format(axis[1], tostring(p.at[axis[1]]))
  end
  return table.concat(words, ", ")
end

local function full_name(walk, p)
  return ("%s: %s"):format(walk.name, name_of(walk.axes, p))
end

local function clock_us() return tonumber(kv.C.kvl_clock_ns()) * 1e-3 end

--- Makes the work of a point and checks it. Returns its time and its work.
local function look(b, walk, p)
  local work = walk.make(b, p.at)
  if work.check then work.check() end
  b:settle(work.run)
  local us, times, stop = math.huge, 0, clock_us() + LOOK_US[b.kind]
  repeat
    us, times = math.min(us, (b:sample(work.run, 1))), times + 1
  until b.quick or times == MOST or times >= LEAST and clock_us() > stop
  local read = READ / (b.quick and 32 or 1)
  return { us = us, work = (work.bytes or 0) / b:limit("R", read) * 1e-3
    + (work.flops or 0) / b:limit "T" * 1e-6 }
end

--- Measures a point; the shorter time counts. Returns whether it went well.
local function measure(b, walk, p)
  local got, why = b:attempt(look, b, walk, p)
  p.looks = (p.looks or 0) + 1
  if not got then
    b:print_row { id = walk.id, name = full_name(walk, p), error = why }
    return false
  end
  p.us, p.work = math.min(p.us or math.huge, got.us), got.work
  return true
end

--- Measures points that stand out again, and the neighbours that they are compared with.
-- Returns the cliffs that are left.
local function settled(b, walk, points)
  local floor, again = FLOOR_US[b.kind], true
  local cliffs = M.judge(walk.axes, points, floor)
  while again and not b.quick do
    again = false
    for _, cliff in ipairs(cliffs) do
      for _, p in ipairs { cliff, cliff.beside } do
        if p.looks < LOOKS then
          measure(b, walk, p)
          again = true
        end
      end
    end
    cliffs = M.judge(walk.axes, points, floor)
  end
  return cliffs
end

local function print_point(b, walk, p)
  b:print_row { id = walk.id, name = full_name(walk, p), us = p.us,
    trend_us = p.trend_us, ratio = p.ratio, beside = name_of(walk.axes, p.beside) }
end

--- Runs a walk and prints a row with its highest point, and one for each cliff. Returns
-- whether every point passed its check.
---@param b kvlab.Bench
---@param walk table  see Bench:walk
function M.run(b, walk)
  local points, ok, highest = {}, true, nil
  local settle_us, flush_buffer = b.settle_us, b.flush_buffer
  b.settle_us = b.quick and 0 or SETTLE_US[b.kind]
  if b.kind == "cpu" and not b.quick then
    b.flush_buffer = flush_buffer:narrow(0, FLUSH_CPU / 4)
  end
  for _, p in ipairs(points_of(walk.axes)) do
    if not (walk.skip and walk.skip(p.at)) then
      if measure(b, walk, p) then points[#points + 1] = p else ok = false end
    end
  end
  local cliffs, all = settled(b, walk, points), {}
  b.settle_us, b.flush_buffer = settle_us, flush_buffer
  for i, p in ipairs(points) do
    if not highest or p.ratio > highest.ratio then highest = p end
    all[i] = { at = p.at, us = p.us, work_us = p.work, ratio = p.ratio }
  end
  if highest then
    b:print_row { id = walk.id, name = walk.name, points = #points, cliffs = #cliffs,
      ratio = highest.ratio, at = name_of(walk.axes, highest), all = all }
  end
  for _, p in ipairs(cliffs) do print_point(b, walk, p) end
  return ok
end

return M
