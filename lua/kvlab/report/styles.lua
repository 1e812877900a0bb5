--- How a series looks in every picture: its colour, marker and dash, as gnuplot numbers
-- them. A policy looks the same in all pictures, whatever else is in them.
--
-- The policies of lua/policies are in the table below. No two of them share colour and
-- marker, and those that are compared most often have a colour of their own. Any other
-- policy is drawn with pentagons, which no policy of the table has. Its name decides the
-- colour and the dash; if something else in the picture has this colour, it takes the
-- next colour that is free, or, where none is, the next style.
local M = {}

local BLACK, GREY = "#000000", "#8c8c8c"

--- Okabe and Ito's colours, which colour-blind readers can tell apart. Yellow is left
-- out, because it is hard to see on a white page.
M.COLOURS = {
  "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", GREY,
}
local BLUE, RED, GREEN, PURPLE, ORANGE, SKY = unpack(M.COLOURS)
local SOLID, DASHED, DOTTED, MIXED = 1, 4, 3, 5

---@class kvlab.style
---@field colour string   as #rrggbb
---@field marker integer  as the terminals svg, pdfcairo and pngcairo have it
---@field dash integer
---@field is_stranger? boolean  a policy that is not in the table

local function style(colour, marker, dash)
  return { colour = colour, marker = marker, dash = dash }
end

local POLICIES = {
  full = style(BLACK, 7, SOLID),
  oracle = style(GREY, 9, SOLID), mass_oracle = style(GREY, 5, DASHED),
  random = style(GREY, 6, DOTTED),
  quest = style(BLUE, 7, SOLID), infllm = style(BLUE, 4, DASHED),
  topk = style(BLUE, 2, DOTTED),
  block_mean = style(RED, 5, SOLID), twilight = style(RED, 8, DASHED),
  union = style(RED, 1, DOTTED),
  gsa_on_device = style(GREEN, 9, SOLID), gsa = style(GREEN, 10, DASHED),
  xattention = style(GREEN, 2, DOTTED),
  h2o_blocks = style(PURPLE, 13, SOLID), h2o = style(PURPLE, 5, DASHED),
  layers = style(PURPLE, 6, DASHED), magicpig = style(PURPLE, 3, DOTTED),
  streaming_blocks = style(ORANGE, 11, SOLID), streaming = style(ORANGE, 5, DASHED),
  nsa = style(ORANGE, 12, DASHED), nsa_branches = style(ORANGE, 1, DOTTED),
  snapkv_blocks = style(SKY, 13, SOLID), snapkv = style(SKY, 7, DASHED),
  keydiff_blocks = style(SKY, 4, DASHED), keydiff = style(SKY, 5, SOLID),
  knorm = style(SKY, 1, DOTTED), tova = style(GREEN, 7, SOLID),
  rocketkv = style(BLUE, 9, SOLID), rkv = style(GREEN, 4, DASHED),
  duo = style(ORANGE, 8, DOTTED),
}

-- If there are more series (other than policies) than colours, the colours repeat with
-- other lines and markers: filled, then hollow, then crosses.
local ROUNDS = {
  { dash = SOLID, markers = { 7, 5, 9, 13, 11, 15, 7 } },
  { dash = DASHED, markers = { 6, 4, 8, 12, 10, 14, 6 } },
  { dash = DOTTED, markers = { 1, 2, 3, 2, 3, 1, 2 } },
}
local PENTAGONS = { { 15, SOLID }, { 14, DASHED }, { 15, MIXED }, { 14, DOTTED } }

--- The style of the i-th series, from 0.
local function in_order(i)
  local at, round = i % #M.COLOURS + 1, math.floor(i / #M.COLOURS) % #ROUNDS + 1
  return style(M.COLOURS[at], ROUNDS[round].markers[at], ROUNDS[round].dash)
end

--- A number from 0 to n - 1 that depends on the name alone.
local function hash(name, n)
  local h = 0
  for i = 1, #name do h = (h * 31 + name:byte(i)) % 2147483647 end
  return h % n
end

--- Adds the styles of policies that are not in the table to those of the others.
local function add_strangers(styles, names)
  local taken, used, n = {}, {}, #M.COLOURS * #PENTAGONS
  for _, own in pairs(styles) do used[own.colour] = true end
  local function colour_of(at) return M.COLOURS[at % #M.COLOURS + 1] end
  --- The first style from `at` on that is free, if possible in a colour that is.
  local function next_free(at)
    local second
    for i = at, at + n - 1 do
      if not taken[i % n] then
        if not used[colour_of(i)] then return i % n end
        second = second or i % n
      end
    end
    return second or at
  end
  table.sort(names)
  for _, name in ipairs(names) do
    local at = next_free(hash(name, n))
    local pentagon = PENTAGONS[math.floor(at / #M.COLOURS) + 1]
    styles[name] = style(colour_of(at), pentagon[1], pentagon[2])
    styles[name].is_stranger = true
    taken[at], used[colour_of(at)] = true, true
  end
end

--- Returns the style of each series by its name: for policies by their name, for other
-- series by their order.
---@param names string[]
---@param are_policies? boolean
---@return table<string, kvlab.style>
function M.of(names, are_policies)
  local styles, strangers = {}, {}
  for i, name in ipairs(names) do
    styles[name] = are_policies and POLICIES[name] or nil
    if not are_policies then styles[name] = in_order(i - 1) end
    if not styles[name] then strangers[#strangers + 1] = name end
  end
  add_strangers(styles, strangers)
  return styles
end

--- The names of the policies that have a style of their own.
---@return string[]  # in the order of the alphabet
function M.policies()
  local names = {}
  for name in pairs(POLICIES) do names[#names + 1] = name end
  table.sort(names)
  return names
end

return M
