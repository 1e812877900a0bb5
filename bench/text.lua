--- Text to tokens (H3): the time of one core for a megabyte of text, with the small
-- tokenizers of the specs. English has words with realistic frequencies (the n-th most
-- frequent word in proportion to 1/n), mixed scripts have the texts of the specs. One
-- word of a megabyte is the worst case, because no piece of it is in the cache.
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"

local FOLDER = kv.paths.root .. "/spec/data/tokenizers/"
local BYTES, WORDS, REPEATS = 1e6, 30000, 9

--- A generator of numbers from 0 to 1.
local function random()
  local state = 12345
  return function()
    state = state * 48271 % 2147483647
    return state / 2147483647
  end
end

local function english()
  local rng, words, list, bytes = random(), {}, {}, 0
  for i = 1, WORDS do
    local letters = {}
    for k = 1, 1 + math.floor(rng() * 4 + rng() * 6) do
      letters[k] = ("etaoinshrdlucmfwypvbgkjqxz"):sub(1 + math.floor(26 * rng() ^ 2))
        :sub(1, 1)
    end
    words[i] = table.concat(letters)
  end
  while bytes < BYTES do
    local word = words[math.floor(WORDS ^ rng())]
    list[#list + 1] = rng() < 0.08 and word .. "," or word
    bytes = bytes + #word + 1
  end
  return table.concat(list, " ")
end

--- The texts of the specs in a random order, each from another place on.
local function mixed()
  local rng, list, bytes = random(), {}, 0
  local texts = json.decode(files.read(FOLDER .. "goldens.json")).texts
  while bytes < BYTES do
    local text = texts[1 + math.floor(rng() * #texts)]
    if type(text) == "string" and text ~= "" then
      text = text:sub(1 + math.floor(rng() * 8))
      list[#list + 1], bytes = text, bytes + #text
    end
  end
  return table.concat(list)
end

local function one_word()
  local rng, letters = random(), {}
  for i = 1, BYTES do letters[i] = string.char(97 + math.floor(26 * rng() ^ 2)) end
  return table.concat(letters)
end

local function time_of(name, make)
  return function()
    local t, text, list = kv.tokenizer(FOLDER .. name .. ".json"), make(), {}
    local ids = t:encode(text)
    for i = 1, REPEATS do
      local start = kv.C.kvl_clock_ns()
      t:encode(text)
      list[i] = tonumber(kv.C.kvl_clock_ns() - start) * 1e-3
    end
    local us = kv.statistics.median(list)
    return { us = us, note = ("%.1f MB/s, %d tokens"):format(#text / us, #ids) }
  end
end

return function(b)
  local texts = { { "words", english }, { "mixed scripts", mixed },
                  { "one word", one_word } }
  for _, name in ipairs { "gpt2", "llama3", "llama2" } do
    for _, text in ipairs(texts) do
      b:case { id = "H3", name = ("encode 1 MB, %s, %s"):format(name, text[1]),
               setup = time_of(name, text[2]) }
    end
  end
end
