--- Models from GGUF files: small ones against the GGUF loader of transformers
-- (tools/gguf_goldens.py), SmolLM2 as a whole (tools/smollm2_goldens.py), and what is
-- said of files that cannot be run. Tolerance of the small ones: f32 against f32, as in
-- llama_spec.lua.
local downloads = require "kvlab.downloads"
local files = require "kvlab.files"
local gguf = require "spec.gguf_files"
local json = require "kvlab.json"
local kv = require "kvlab"
local library = require "kvlab.library"
local llama = require "models.llama"
local support = require "spec.support"
local temporary = require "spec.temporary"

local DATA = kv.paths.root .. "/spec/data/gguf/"
local PROGRAM = kv.paths.executable or kv.paths.root .. "/kvlab"

local function read_json(path)
  local file = assert(io.open(path))
  local fields = json.decode(file:read "*a")
  file:close()
  return fields
end

-- Prints by how much loading raised the peak memory of a process of its own, and the
-- bytes of the weights and of the largest tensor.
local LOADS = [[
local llama = require "models.llama"
local function memory(key)
  for line in io.lines "/proc/self/status" do
    local kib = line:match("^" .. key .. ":%s+(%d+) kB")
    if kib then return 1024 * tonumber(kib) end
  end
end
local before = memory "VmRSS"
local model = llama.load("smollm2", { device = "cpu", dtype = "f32" })
print(memory "VmHWM" - before, model:weight_bytes(), model.embedding:bytes())
]]

support.each_device(function(dev)
  for _, name in ipairs { "llama", "qwen2", "qwen3", "mixtral", "qwen3_moe" } do
    it(("gives the logits of transformers: %s on %s"):format(name, dev:name()), function()
      local golden, flat = read_json(DATA .. name .. ".json"), {}
      for _, row in ipairs(golden.logits) do
        for _, x in ipairs(row) do flat[#flat + 1] = x end
      end
      local model = llama.load(DATA .. name .. ".gguf", { device = dev, dtype = "f32" })
      local engine = model:engine { blocks = 16 }
      local got = engine:prefill_all(engine:sequence(), golden.tokens)
      support.close(got, flat, 2e-4, 2e-4, name)
    end)
  end
end)

describe("a GGUF model", function()
  it("has the configuration of its folder", function()
    for _, name in ipairs { "llama", "qwen2", "qwen3", "mixtral", "qwen3_moe" } do
      local folder = kv.paths.root .. "/spec/data/hf/" .. name
      local o = { device = "cpu", dtype = "f32" }
      local from_file = llama.load(DATA .. name .. ".gguf", o).config
      local from_folder = llama.load(folder, o).config
      for _, field in ipairs { "layers", "heads", "kv_heads", "head_dim", "hidden",
        "inner", "vocab", "tied", "qkv_bias", "out_bias" } do
        assert.equal(from_folder[field], from_file[field], name .. " " .. field)
      end
      for i, f in ipairs(from_folder.inv_freq) do
        assert.near(f, from_file.inv_freq[i], 1e-6 * f)
      end
    end
  end)

  --- Loads llama.gguf with other metadata: changes by key; false removes one.
  local function load_changed(changes, tensors)
    local file, keys, list, at = kv.gguf(DATA .. "llama.gguf"), {}, {}, 0
    changes["general.architecture"] = changes["general.architecture"]
      or { "string", "llama" }
    for key, value in pairs(file.metadata) do
      if changes[key] == nil and type(value) == "number" then
        keys[#keys + 1] = gguf.key(key, value % 1 == 0 and "u32" or "f32", value)
      end
    end
    for key, change in pairs(changes) do
      if change then keys[#keys + 1] = gguf.key(key, unpack(change)) end
    end
    for _, name in ipairs(file.names) do -- f32 zeros
      local shape, sizes, bytes = file:describe(name), {}, 4
      for i, size in ipairs(shape) do
        sizes[#shape + 1 - i], bytes = size, bytes * size
      end
      list[#list + 1] = gguf.tensor(name, sizes, 0, at)
      at = at + bytes
    end
    for _, name in ipairs(tensors or {}) do
      list[#list + 1] = gguf.tensor(name, { 8 }, 0, at)
      at = at + 32
    end
    local path = temporary.path() .. ".gguf"
    local out = assert(io.open(path, "wb"))
    out:write(gguf.file { keys = keys, tensors = list, data = ("\0"):rep(at) })
    out:close()
    local ok, why = pcall(llama.load, path, { device = "cpu" })
    os.remove(path)
    return ok, why, path
  end

  local function fails(words, changes, tensors)
    local ok, why, path = load_changed(changes, tensors)
    if not words then return assert.is_true(ok, why) end
    assert.is_false(ok)
    assert.truthy(why:find(words, 1, true), why)
    assert.truthy(why:find(path, 1, true), why)
  end

  it("is refused with words that name what is not supported", function()
    fails(nil, {})
    fails("general.architecture is gpt2, expected llama, qwen2",
      { ["general.architecture"] = { "string", "gpt2" } })
    fails("num_hidden_layers is nil, expected a whole number",
      { ["llama.block_count"] = false })
    fails("no tensor \"blk.2.attn_norm.weight\"",
      { ["llama.block_count"] = { "u32", 3 } })
    fails("tensor \"blk.1.", { ["llama.block_count"] = { "u32", 1 } })
    fails("has shape [", { ["llama.embedding_length"] = { "u32", 32 } })
    fails("partial_rotary_factor is 0.5",
      { ["llama.rope.dimension_count"] = { "u32", 8 } })
    fails("partial_rotary_factor is 0.5", {
      ["llama.attention.key_length"] = false, ["llama.attention.value_length"] = false,
      ["llama.rope.dimension_count"] = { "u32", 8 } })
    fails("attention.value_length is 32, expected that of keys, 16",
      { ["llama.attention.value_length"] = { "u32", 32 } })
    fails("attn_logit_softcapping is 50, expected none",
      { ["llama.attn_logit_softcapping"] = { "f32", 50 } })
    for key, value in pairs { ["attention.sliding_window"] = 64, ["rope.freq_scale"] = 2,
      ["rope.scaling.yarn_beta_fast"] = 8, ["attention.layer_norm_epsilon"] = 1,
      pooling_type = 1, no_such_key = 3 } do
      fails(("%s is %d, expected none"):format(key, value),
        { ["llama." .. key] = { "f32", value } })
    end
    fails(nil, { ["llama.attention.sliding_window"] = { "u32", 0 },
                 ["llama.attention.causal"] = { "bool", 1 } })
    fails("attention.causal is false, expected true",
      { ["llama.attention.causal"] = { "bool", 0 } })
    fails("split.count is 2, expected 1", { ["split.count"] = { "u32", 2 } })
    fails("rms_norm_eps is nil, expected", {
      ["llama.attention.layer_norm_rms_epsilon"] = false })
    fails("max_position_embeddings is nil, expected",
      { ["llama.context_length"] = false })
    fails("rope.scaling.type is longrope, expected none, linear or yarn",
      { ["llama.rope.scaling.type"] = { "string", "longrope" } })
    fails("factor is nil", { ["llama.rope.scaling.type"] = { "string", "linear" } })
    fails("tensor \"blk.0.attn_sinks.weight\" is no part of llama", {},
      { "blk.0.attn_sinks.weight" })
    fails("rope_freqs.weight is 8 numbers, expected 16",
      { ["llama.attention.key_length"] = { "u32", 32 },
        ["llama.attention.value_length"] = false }, { "rope_freqs.weight" })
  end)

  it("names what is wrong whatever its metadata hold", function()
    local keys = { "general.architecture", "llama.expert_count",
      "llama.expert_used_count", "llama.rope.scale_linear", "llama.rope.scaling.type",
      "llama.rope.scaling.factor", "llama.rope.dimension_count" }
    for key, value in pairs(kv.gguf(DATA .. "llama.gguf").metadata) do
      if type(value) == "number" then keys[#keys + 1] = key end
    end
    assert.is_true(#keys > 15)
    for _, key in ipairs(keys) do
      for _, value in ipairs { { "string", "x" }, { "string", "yarn" }, { "string", {} },
        { "f32", -1 }, { "f32", 0.5 }, { "f32", 0 / 0 }, { "u64", 2 ^ 60 }, { "u8", 0 },
        { "bool", 1 }, { "u32", 7 }, { "u32", { 1, 2 } } } do
        local ok, why, path = load_changed { [key] = value }
        if not ok then
          assert.truthy(why:find(path, 1, true), key .. ": " .. why)
          for _, words in ipairs { "attempt to", "bad argument" } do
            assert.falsy(why:find(words, 1, true), key .. ": " .. why)
          end
        end
      end
    end
  end)

  it("is loaded by the family that its config names", function()
    local families = require "models.families"
    local o = { device = "cpu", dtype = "f32" }
    local hf = kv.paths.root .. "/spec/data/hf/"
    for path, kind in pairs { [DATA .. "qwen3.gguf"] = "models.llama",
      [hf .. "mixtral"] = "models.llama", [hf .. "gemma2"] = "models.gemma" } do
      local other = require(kind).load(path, o)
      local model = families.load(path, o)
      assert.equal(getmetatable(other), getmetatable(model))
      assert.same(other.config.inv_freq, model.config.inv_freq)
    end
    local ok, why = pcall(families.load, "/nowhere", o)
    assert.is_false(ok)
    assert.truthy(why:find("/nowhere/config.json", 1, true), why)
  end)

  it("is found by its name, or the error says how to fetch it", function()
    local checkpoint = require "models.checkpoint"
    assert.equal("some/folder", checkpoint.find "some/folder")
    local find = downloads.find
    downloads.find = function() return nil end
    local ok, why = pcall(llama.load, "smollm2", { device = "cpu" })
    downloads.find = find
    assert.is_false(ok)
    assert.equal("smollm2 is not on this machine; this fetches it: " .. library.program
      .. " get smollm2", why)
  end)
end)

describe("what is no model", function()
  local HOW = ". A model is a folder with config.json and its weights, a file that ends "
    .. ("with .gguf, or a name that %s get fetches: smollm2"):format(library.program)

  local function refused(words, path)
    for name, open in pairs { ["kv.model"] = kv.model, ["llama.load"] = llama.load,
      ["families.load"] = require("models.families").load } do
      local ok, why = pcall(open, path, { device = "cpu" })
      assert.is_false(ok)
      assert.equal(words, why, name)
    end
  end

  it("is refused with what a model is, and how to get one", function()
    refused("nothere/config.json: No such file or directory" .. HOW, "nothere")
    refused("./nothere.gguf: No such file or directory" .. HOW, "./nothere.gguf")
    refused("smollm3/config.json: No such file or directory. Did you mean smollm2?"
      .. HOW:sub(2), "smollm3")
    local readme = kv.paths.root .. "/LICENSE"
    refused(readme .. "/config.json: Not a directory" .. HOW, readme)
    local folder = temporary.folder()
    refused(folder .. "/config.json: No such file or directory" .. HOW, folder)
    files.write(folder .. "/tiny.gguf", "GGUF")
    refused(("%s/config.json: No such file or directory. %s holds tiny.gguf%s")
      :format(folder, folder, HOW), folder)
  end)

  it("is blamed on its path, not on a line of the loader", function()
    local folder = temporary.folder()
    files.write(folder .. "/tiny.gguf", "GGUF")
    for _, path in ipairs { folder .. "/tiny.gguf", folder } do
      if path == folder then
        files.write(folder .. "/config.json", files.read(kv.paths.root
          .. "/spec/data/hf/qwen3/config.json"))
      end
      local ok, why = pcall(llama.load, path, { device = "cpu" })
      assert.is_false(ok)
      assert.equal(1, (why:find(folder, 1, true)), why)
    end
  end)
end)

describe("SmolLM2 #model", function()
  -- The same sums in f32 in another order, over 30 layers: measured 1.5e-6.
  local MOST = 1e-3

  it("has the logits of transformers, and 200 greedy tokens", function()
    local golden = read_json(DATA .. "smollm2.json")
    local model = llama.load("smollm2", { device = "cpu", dtype = "f32" })
    local engine = model:engine { blocks = 32 }
    local seq = engine:sequence()
    local all = engine:prefill_all(seq, golden.tokens)
    for position, wanted in pairs(golden.logits) do
      local got, difference, size = all:index(tonumber(position) - 1):list(), 0, 0
      for i, x in ipairs(wanted) do
        difference = difference + (got[1 + (i - 1) * golden.every] - x) ^ 2
        size = size + x ^ 2
      end
      assert.is_true(math.sqrt(difference / size) <= MOST, position)
    end
    local logits = all:narrow(#golden.tokens - 1, 1)
    assert.same(golden.greedy, engine:generate(seq, logits, #golden.greedy))
  end)

  it("is loaded in the memory of its weights and one tensor", function()
    local script = temporary.file(LOADS)
    local pipe = io.popen(("'%s' run '%s'"):format(PROGRAM, script))
    local text = pipe:read "*a"
    pipe:close()
    local peak, weights, largest = text:match "(%d+)%s+(%d+)%s+(%d+)"
    local metadata = 64e6 -- of the file: tokens and merges as Lua strings, and their text
    assert.is_true(tonumber(peak) <= weights + largest + metadata, text)
  end)
end)
