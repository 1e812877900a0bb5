--- Timelines: when a device did what, and how much of the loading overlapped compute.
--
--   local spans = {                     -- as in the trace of a ring; in microseconds
--     { kind = "load", slot = 0, begin_us = 0, end_us = 41, layer = 0 },
--     { kind = "load", slot = 1, begin_us = 41, end_us = 82, layer = 1 },
--     { kind = "compute", slot = 0, begin_us = 42, end_us = 90, layer = 0 },
--   }
--   timeline.overlap(spans).hidden      -- 40 / 82 of the load time lies under compute
--   local svg, why = plot.svg(timeline.plot(spans, { title = "One decode step" }))
--
-- The picture has one line of boxes for each `row` that the spans name. Spans without a
-- row get "compute", "slot 0 load", "slot 1 load" or "offload". The colour of a box shows
-- its kind. A box that is wide enough has the layer's number in it. Time 0 is the first
-- begin.
local arguments = require "kvlab.arguments"
local gnuplot = require "kvlab.report.gnuplot"
local options = require "kvlab.options"
local styles = require "kvlab.report.styles"
local tics = require "kvlab.report.tics"

local M = {}

-- The order of kinds in the colours, in the legend and in the rows.
local KINDS = { "compute", "load", "offload" }
local RANK = { compute = 1, load = 2, offload = 3 }

-- In pixels. The space around the boxes is the same as in a line plot.
local WIDTH, ROW, BOX = 760, 30, 22
local ROOM = { left = 34, right = 14, top = 12, bottom = 66 }
local LEGEND, DIGIT = 160, 7

--- Raises unless every span has a known kind, a begin, and an end that is not earlier.
local function check(spans, caller)
  for i, span in ipairs(spans) do
    local from, to = span.begin_us, span.end_us
    if not RANK[span.kind] then
      error(("timeline.%s: span %d is of kind %s, expected one of %s"):format(caller, i,
        tostring(span.kind), table.concat(KINDS, ", ")), 3)
    end
    if not (type(from) == "number" and type(to) == "number" and to - from >= 0
      and to - from < math.huge) then
      error(("timeline.%s: span %d lasts from %s to %s"):format(caller, i,
        options.shown(from), options.shown(to)), 3)
    end
    for _, name in ipairs { "slot", "layer" } do
      if span[name] ~= nil and not options.any_integer[2](span[name]) then
        error(("timeline.%s: %s of span %d is %s, expected a whole number"):format(caller,
          name, i, options.shown(span[name])), 3)
      end
    end
  end
end

--- The first begin and the last end; 0, 0 for no spans.
local function find_range(spans)
  if #spans == 0 then return 0, 0 end
  local first, last = math.huge, -math.huge
  for _, span in ipairs(spans) do
    first, last = math.min(first, span.begin_us), math.max(last, span.end_us)
  end
  return first, last
end

--- Merges the spans of a kind into the intervals {from, to} that they cover, in ascending
-- order, with gaps between them.
local function cover(spans, kind)
  local sorted, covered = {}, {}
  for _, span in ipairs(spans) do
    if span.kind == kind then sorted[#sorted + 1] = span end
  end
  table.sort(sorted, function(a, b) return a.begin_us < b.begin_us end)
  for _, span in ipairs(sorted) do
    local last = covered[#covered]
    if last and span.begin_us <= last[2] then
      last[2] = math.max(last[2], span.end_us)
    else
      covered[#covered + 1] = { span.begin_us, span.end_us }
    end
  end
  return covered
end

local function sum(intervals)
  local total = 0
  for _, interval in ipairs(intervals) do total = total + interval[2] - interval[1] end
  return total
end

--- The time that two covers share.
local function sum_common(a, b)
  local total, i, j = 0, 1, 1
  while a[i] and b[j] do
    local from, to = math.max(a[i][1], b[j][1]), math.min(a[i][2], b[j][2])
    total = total + math.max(to - from, 0)
    if a[i][2] < b[j][2] then i = i + 1 else j = j + 1 end
  end
  return total
end

---@class kvlab.span
---@field kind "compute"|"load"|"offload"
---@field begin_us number
---@field end_us number    not before begin_us
---@field row? string      of the picture; default: the kind, and for a load its slot
---@field slot? integer
---@field layer? integer   the number in the box

---@class kvlab.overlap
---@field load_us number     time in which at least one load was under way
---@field compute_us number  time in which at least one compute span was under way
---@field both_us number     time in which both were
---@field wall_us number     from the first begin to the last end, of any kind
---@field idle_us number     wall_us - compute_us
---@field hidden number      both_us / load_us; NaN without any load time

--- Measures how much of the loading lies under the compute. Times are lengths of unions:
-- two simultaneous loads count once, and a span inside another of its kind adds nothing.
-- Offloads count only in wall_us.
---@param spans kvlab.span[]  in any order
---@return kvlab.overlap
function M.overlap(spans)
  check(spans, "overlap")
  local loads, computes = cover(spans, "load"), cover(spans, "compute")
  local first, last = find_range(spans)
  local wall_us, load_us, compute_us = last - first, sum(loads), sum(computes)
  local both_us = sum_common(loads, computes)
  return {
    load_us = load_us, compute_us = compute_us, both_us = both_us, wall_us = wall_us,
    idle_us = wall_us - compute_us, hidden = both_us / load_us,
  }
end

local function row_of(span)
  if span.row then return tostring(span.row) end
  return span.kind == "load" and span.slot and ("slot %d load"):format(span.slot)
    or span.kind
end

--- Orders the rows from top to bottom: those with compute first, those of offloads last,
-- and "slot 2" before "slot 10". Returns the names, and the position of each name.
local function order_rows(spans)
  local names, rank, key, place = {}, {}, {}, {}
  for _, span in ipairs(spans) do
    local name = row_of(span)
    if not rank[name] then
      names[#names + 1] = name
      key[name] = name:gsub("%d+", function(digits)
        return ("0"):rep(9 - #digits) .. digits
      end)
    end
    rank[name] = math.min(rank[name] or math.huge, RANK[span.kind])
  end
  table.sort(names, function(a, b)
    if rank[a] ~= rank[b] then return rank[a] < rank[b] end
    return key[a] < key[b]
  end)
  for i, name in ipairs(names) do place[name] = i end
  return names, place
end

---@class kvlab.timeline
---@field kind "timeline"
---@field title? string
---@field file? string     the picture's name in an experiment's folder
---@field xlabel string
---@field length number    of the axis, in the unit of the boxes
---@field rows string[]    from top to bottom
---@field boxes {row: integer, kind: string, from: number, to: number, layer?: integer}[]

local VIEW = { title = options.string, file = options.string }

--- A timeline for plot.svg and for an experiment's `plot = function(rows)`.
---@param spans kvlab.span[]  in any order; the later in the list is drawn on top
---@param view? {title?: string, file?: string}
---@return kvlab.timeline
function M.plot(spans, view)
  check(spans, "plot")
  view = options.check("timeline.plot", view, VIEW)
  local first, last = find_range(spans)
  local unit, us = "us", 1
  if last - first >= 1e4 then unit, us = "ms", 1000 end
  local p = {
    kind = "timeline", title = view.title, file = view.file or "timeline",
    xlabel = ("time (%s)"):format(unit), boxes = {},
    length = last > first and (last - first) / us or 1,
  }
  local place
  p.rows, place = order_rows(spans)
  for i, span in ipairs(spans) do
    p.boxes[i] = {
      row = place[row_of(span)], kind = span.kind, layer = span.layer,
      from = (span.begin_us - first) / us, to = (span.end_us - first) / us,
    }
  end
  return p
end

--- Adds the boxes of a kind as a data block of middles and corners. A box is at least one
-- pixel wide. A wide box ends one pixel early, which leaves a gap to a box that follows
-- at once. Returns whether there are any boxes.
local function add_boxes(out, p, kind)
  local pixel, is_any = p.length / WIDTH, false
  out[#out + 1] = "$" .. kind .. " << EOD"
  for _, box in ipairs(p.boxes) do
    if box.kind == kind then
      is_any = true
      local to = math.max(box.to, box.from + pixel)
      if to - box.from > 4 * pixel then to = to - pixel end
      local y = -box.row
      out[#out + 1] = ("%.17g %d %.17g %.17g %g %g"):format((box.from + to) / 2, y,
        box.from, to, y - BOX / ROW / 2, y + BOX / ROW / 2)
    end
  end
  out[#out + 1] = "EOD"
  return is_any
end

--- Adds the layer's number of each box that has room for it. Returns whether any has.
local function add_labels(out, p)
  local pixel, has_labels = p.length / WIDTH, false
  out[#out + 1] = "$labels << EOD"
  for _, box in ipairs(p.boxes) do
    local text = box.layer and ("%d"):format(box.layer)
    if text and (box.to - box.from) / pixel >= DIGIT * #text + 6 then
      has_labels = true
      out[#out + 1] = ("%.17g %d %s"):format((box.from + box.to) / 2, -box.row, text)
    end
  end
  out[#out + 1] = "EOD"
  return has_labels
end

local function add_axes(out, p)
  local names = {}
  for i, name in ipairs(p.rows) do names[i] = { -i, name } end
  if #names == 0 then names[1] = { -1, "" } end -- without tics, gnuplot adds its own
  out[#out + 1] = ("set xrange [0:%.17g]"):format(p.length)
  out[#out + 1] = ("set yrange [%g:-0.5]"):format(-math.max(#p.rows, 1) - 0.5)
  out[#out + 1] = "set xtics " .. gnuplot.write_tics(tics.round(0, p.length))
  out[#out + 1] = "set ytics scale 0 " .. gnuplot.write_tics(names)
  out[#out + 1] = "set xlabel " .. gnuplot.quote(p.xlabel)
end

--- A script that writes a picture to its standard output.
---@param p kvlab.timeline
---@param format? "svg"|"pdf"|"png"
---@return string
function M.script(p, format)
  local panel = { width = WIDTH, height = math.max(#p.rows, 1) * ROW }
  local left = ROOM.left + gnuplot.LETTER * gnuplot.longest(p.rows)
  local picture = {
    width = math.ceil(left + WIDTH + ROOM.right + LEGEND),
    height = math.max(gnuplot.TITLE + ROOM.top + panel.height + ROOM.bottom,
      gnuplot.TITLE + (#KINDS + 2) * gnuplot.LEGEND_LINE),
  }
  local out = gnuplot.begin(format or "svg", picture.width, picture.height, p.title)
  out[#out + 1] = gnuplot.place(picture, panel, left, gnuplot.TITLE + ROOM.top)
  out[#out + 1] = "unset grid\nset grid x\nset style fill solid noborder"
  add_axes(out, p)
  local boxes, keys = { "NaN notitle" }, { "NaN notitle" } -- with no spans, axes only
  for i, kind in ipairs(KINDS) do
    if add_boxes(out, p, kind) then
      local colour = ("lc rgb \"%s\""):format(styles.COLOURS[i])
      boxes[#boxes + 1] = ("$%s with boxxyerror %s"):format(kind, colour)
      keys[#keys + 1] = ("NaN with boxxyerror %s title '%s'"):format(colour, kind)
    end
  end
  if add_labels(out, p) then
    boxes[#boxes + 1] = "$labels with labels font \"sans-serif,11\" tc rgb \"white\""
    keys[#keys + 1] = "NaN with lines lc rgb \"#ff000000\" title 'number: layer'"
  end
  out[#out + 1] = "plot " .. table.concat(boxes, ", ")
  gnuplot.finish(out, picture, { left = left + WIDTH + ROOM.right + 4,
    top = gnuplot.TITLE + ROOM.top - 8, length = 1.2, items = keys })
  return table.concat(out, "\n")
end

--- The kind of a timeline.
M.TIMELINE = { "a timeline, as timeline.plot makes it", function(x)
  return type(x) == "table" and x.kind == "timeline" and type(x.boxes) == "table"
    and type(x.rows) == "table" and type(x.length) == "number"
end }
local SPANS = options.list_of(options.table)
arguments.functions(M, "timeline", { overlap = { spans = SPANS },
  plot = { spans = SPANS },
  script = { p = M.TIMELINE, format = options.optional(gnuplot.FORMAT) } })

return M
