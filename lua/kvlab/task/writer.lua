--- What a task draws its examples from: numbers, words, and sentences without importance.
-- The same seed draws the same. Things that have to differ, such as names and numbers,
-- are never drawn twice. Sentences come from a stream of their own, so that a longer text
-- has the same needles.
local arguments = require "kvlab.arguments"
local options = require "kvlab.options"
local seeds = require "kvlab.seeds"
local uniform = require "kvlab.tensor.uniform"
local vocabulary = require "kvlab.task.vocabulary"

local M = {}

-- The numbers of what is drawn, for seeds.derive.
local MAIN, NOISE, ORDER = 1, 2, 3

---@class kvlab.task.Writer
---@field sentences string[]|nil  of a given text; nil: sentences are made up
local Writer = {}
Writer.__index = Writer

---@param seed integer
---@param sentences? string[]
---@return kvlab.task.Writer
function M.new(seed, sentences)
  return setmetatable({ seed = seed, sentences = sentences, is_drawn = {},
                        draw = uniform.generator(seeds.derive(seed, MAIN)) }, Writer)
end

local function whole(draw, n) return 1 + math.floor(draw() * n) end

local function shuffled(draw, list)
  for i = #list, 2, -1 do
    local j = whole(draw, i)
    list[i], list[j] = list[j], list[i]
  end
  return list
end

--- A number from 0 to 1, without 1.
---@return number
function Writer:share() return self.draw() end

--- A whole number from 1 to n.
---@param n integer
---@return integer
function Writer:whole(n) return whole(self.draw, n) end

--- Shuffles a list in place, and returns it.
---@param list any[]
---@return any[]
function Writer:shuffled(list) return shuffled(self.draw, list) end

--- Calls `make` until it draws something new.
local function new_one(self, make)
  for _ = 1, 1000 do
    local text = make()
    if not self.is_drawn[text] then
      self.is_drawn[text] = true
      return text
    end
  end
  error("there are not enough different words for this task", 0)
end

--- A number with so many digits that was not drawn before.
---@param digits integer
---@return string
function Writer:number(digits)
  return new_one(self, function()
    local text = tostring(self:whole(9))
    for _ = 2, digits do text = text .. self:whole(10) - 1 end
    return text
  end)
end

--- A word of so many random letters that was not drawn before.
---@param count integer
---@param first string  the letter that it counts from: "A" or "a"
---@return string
function Writer:letters(count, first)
  return new_one(self, function()
    local text = ""
    for _ = 1, count do text = text .. string.char(first:byte() + self:whole(26) - 1) end
    return text
  end)
end

--- A thing with a quality, "red lamp", that was not drawn before.
---@return string
function Writer:key()
  local v = vocabulary
  return new_one(self, function()
    return v.qualities[self:whole(#v.qualities)] .. " " .. v.things[self:whole(#v.things)]
  end)
end

--- The i-th of the seed's words: things in random order, then things with a quality,
-- "red-lamp". They are all different.
---@param i integer  from 1
---@return string
function Writer:word(i)
  if not self.things then
    local draw = uniform.generator(seeds.derive(self.seed, ORDER))
    self.things = shuffled(draw, { unpack(vocabulary.things) })
    self.qualities = shuffled(draw, { unpack(vocabulary.qualities) })
  end
  local n = #self.things
  local round, at = math.floor((i - 1) / n), (i - 1) % n + 1
  if round == 0 then return self.things[at] end
  local quality = self.qualities[round]
  if not quality then
    error(("a task has %d words, and this needs more"):format(
      n * (#self.qualities + 1)), 0)
  end
  return quality .. "-" .. self.things[at]
end

--- The first n sentences of the seed's noise. They are sentences of the given text, from
-- a random one on; after the last one follows the first. Without a text they are made up.
---@param n integer
---@return string[]
function Writer:noise(n)
  local draw, list = uniform.generator(seeds.derive(self.seed, NOISE)), {}
  local given, v = self.sentences, vocabulary
  local at = given and whole(draw, #given)
  for i = 1, n do
    if given then
      list[i] = given[(at + i - 2) % #given + 1]
    else
      list[i] = ("%s %s %s."):format(v.people[whole(draw, #v.people)],
        v.deeds[whole(draw, #v.deeds)], v.places[whole(draw, #v.places)])
    end
  end
  return list
end

--- The first n sentences of the seed's noise with others inserted: inserts[i] comes after
-- the share depths[i] of the sentences. Inserts at the same depth keep their order.
---@param n integer
---@param inserts string[]
---@param depths number[]  from 0 to 1, one for each insert
---@return string
function Writer:noise_with(n, inserts, depths)
  if #inserts ~= #depths then
    options.fail(("noise_with: depths has %d numbers, expected %d, one for each insert")
      :format(#depths, #inserts))
  end
  local noise, at, text = self:noise(n), {}, {}
  for i, depth in ipairs(depths) do
    local place = math.floor(depth * n + 0.5)
    at[place] = at[place] or {}
    table.insert(at[place], inserts[i])
  end
  for place = 0, n do
    text[#text + 1] = noise[place]
    for _, insert in ipairs(at[place] or {}) do text[#text + 1] = insert end
  end
  return table.concat(text, " ")
end

local LETTERS, SENTENCES = options.within(1, 1000), options.within(0, 1e7)
local TEXTS = options.list_of(options.string)
arguments.methods(Writer, "a writer", {
  whole = { n = options.count }, shuffled = { list = options.table },
  number = { digits = LETTERS },
  letters = { count = LETTERS, first = options.one_of("A", "a") },
  word = { i = options.count }, noise = { n = SENTENCES },
  noise_with = { n = SENTENCES, inserts = TEXTS,
                 depths = options.list_of(options.share) },
})

return M
