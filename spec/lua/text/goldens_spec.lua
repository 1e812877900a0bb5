--- Token ids equal those of the package `tokenizers`, and so does the text that is decoded
-- from them: tokenizers of many kinds, on texts in many scripts, on random characters, and
-- on bytes that are not UTF-8. tools/tokenizer_goldens.py writes the goldens, and says how
-- to compare larger ones.
local bit = require "bit"
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local support = require "spec.support"
local temporary = require "spec.temporary"

local folder = os.getenv "KVLAB_TOKENIZER_GOLDENS"
  or kv.paths.root .. "/spec/data/tokenizers"

-- ---- CRC-32 ---------------------------------------------------------------------------

local CRC = {}
for i = 0, 255 do
  local x = i
  for _ = 1, 8 do
    x = bit.bxor(bit.rshift(x, 1), bit.band(x, 1) == 1 and bit.tobit(0xEDB88320) or 0)
  end
  CRC[i] = x
end

local function add(crc, byte)
  return bit.bxor(bit.rshift(crc, 8), CRC[bit.band(bit.bxor(crc, byte), 255)])
end

local function crc_of_ids(ids)
  local crc = -1
  for i = 1, #ids do
    for shift = 0, 24, 8 do crc = add(crc, bit.band(bit.rshift(ids[i], shift), 255)) end
  end
  return bit.bnot(crc) % 2 ^ 32
end

local function crc_of_text(text)
  local crc = -1
  for i = 1, #text do crc = add(crc, text:byte(i)) end
  return bit.bnot(crc) % 2 ^ 32
end

-- ---- the comparison -------------------------------------------------------------------

local function patched(file, patch)
  for key, value in pairs(patch) do
    if key == "model" then
      for name, x in pairs(value) do file.model[name] = x end
    else
      file[key] = value
    end
  end
  return file
end

local function tokenizer_of(case)
  local file = json.decode(files.read(folder .. "/" .. case.file .. ".json"))
  return kv.tokenizer(temporary.file(json.encode(patched(file, case.patch)),
    "tokenizer.json"))
end

local function text_of(entry)
  if type(entry) == "string" then return entry end
  return (entry.hex:gsub("%x%x", function(x) return string.char(tonumber(x, 16)) end))
end

local goldens = json.decode(files.read(folder .. "/goldens.json"))

describe("a tokenizer", function()
  for _, case in ipairs(support.cases(goldens.cases)) do
    it("encodes and decodes as tokenizers does: " .. case.name, function()
      local t, count = tokenizer_of(case), 0
      local has_fallback = t.decoder.has_fallback
      for i, entry in ipairs(goldens.texts) do
        local text, row = text_of(entry), case.rows[i]
        local plain = t:encode(text)
        local special = t:encode(text, { special = true, bos = false, eos = false })
        local what = ("text %d, %q"):format(i, text)
        assert.same({ row[1], row[2] }, { #plain, crc_of_ids(plain) }, what)
        assert.same({ row[3], row[4] }, { #special, crc_of_ids(special) }, what)
        local decoded = t:decode(special)
        -- Where bytes that are no character come from a fallback, tokenizers writes more
        -- U+FFFD than a stream could.
        if not (has_fallback and decoded:find "\239\191\189") then
          assert.equal(row[5], crc_of_text(decoded), what .. decoded)
        end
        local stream, parts = t:stream(), {}
        for k = 1, #special do parts[k] = stream:push(special[k]) end
        assert.equal(decoded, table.concat(parts) .. stream:finish(), what)
        count = count + #plain + #special
      end
      assert.is_true(count > 1000)
      if os.getenv "KVLAB_TOKENIZER_GOLDENS" then
        print(("%-24s %9d ids, 0 differ"):format(case.name, count))
      end
    end)
  end
end)
