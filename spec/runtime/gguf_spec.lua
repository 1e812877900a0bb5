--- GGUF files: what they hold, against gguf's own Python (tools/gguf_goldens.py made the
-- files), and what is wrong with damaged ones.
local ffi = require "ffi"
local files = require "kvlab.files"
local gguf = require "spec.gguf_files"
local kv = require "kvlab"
local processes = require "spec.processes"
local support = require "spec.support"
local temporary = require "spec.temporary"

ffi.cdef "int memcmp(const void *a, const void *b, size_t bytes);"

local DATA = kv.paths.root .. "/spec/data/gguf/"
local F32, Q8_0, Q2_K = 0, 8, 10 -- ggml's numbers of types
local cpu = kv.device "cpu"

local function open(o) return kv.gguf(temporary.file(gguf.file(o))) end

local function open_error(o)
  local ok, why = pcall(open, o)
  assert.is_false(ok)
  return why
end

local function floats(...)
  local list = { ... }
  return ffi.string(ffi.new("float[?]", #list, list), 4 * #list)
end

describe("gguf", function()
  -- Before all others: a child lacks the threads that its parent's kernels have started.
  it("is refused when it changes while it is open", function()
    local rows = 30000 -- more than is read at once
    local text = gguf.file { tensors = { gguf.tensor("a", { 8 }, F32, 0),
      gguf.tensor("b", { 32, rows }, F32, 32) }, data = ("\0"):rep(32 + 128 * rows) }
    for words, change in pairs {
      ["has 1000 bytes, expected"] = "truncate -s 1000 '%s'",
      ["has 0 bytes, expected"] = ": >'%s'",
      ["it was written to while it was open"] =
        "printf x | dd of='%s' conv=notrunc bs=1 seek=2000 2>/dev/null; touch -d @1 '%s'",
    } do
      local path = temporary.file(text)
      local pid = processes.fork(function() -- which would be killed
        local file = kv.gguf(path)
        assert(os.execute((change:gsub("%%s", path))) == 0)
        for _, name in ipairs { "a", "b" } do
          local ok, why = pcall(file.read, file, name, kv.device "cpu")
          assert(not ok and why:find(path, 1, true) and why:find(words, 1, true), why)
        end
        file:close()
      end)
      assert.equal(0, processes.wait(pid), words)
    end
  end)

  it("reads metadata of every kind", function()
    local file = kv.gguf(DATA .. "types.gguf")
    local m = file.metadata
    assert.same({
      ["general.architecture"] = "none", ["general.alignment"] = 64,
      ["one.uint8"] = 200, ["one.int8"] = -100, ["one.uint16"] = 60000,
      ["one.int16"] = -30000, ["one.uint32"] = 4000000000, ["one.int32"] = -2000000000,
      ["one.float32"] = tonumber(ffi.new("float", 0.1)), ["one.uint64"] = 2 ^ 52 + 1,
      ["one.int64"] = -2 ^ 52 - 1, ["one.float64"] = 0.1, ["one.bool"] = true,
      ["one.false"] = false, ["one.string"] = "a \0 b\195\169",
      ["many.strings"] = { "", "x", "\196\160the", "a \0 b" },
      ["many.bytes"] = { "\255\254", "" }, ["many.integers"] = { 3, -1, 2000000000 },
      ["many.floats"] = { 0.5, -1.25 }, ["many.booleans"] = { true, false, true },
    }, m)
    file:close()
    assert.equal(200, m["one.uint8"])
    assert.same({ ["a.b"] = "", none = {}, [""] = 2 ^ 53 }, open { keys = {
      gguf.key("a.b", "string", ""), gguf.key("none", "string", {}),
      gguf.key("", "u64", 2 ^ 53) } }.metadata)
  end)

  it("has the tensors in the file's order, shapes as PyTorch has them", function()
    local file = open { tensors = { gguf.tensor("b", { 3, 2 }, F32, 0),
      gguf.tensor("a", {}, F32, 32), gguf.tensor("none", { 0, 3 }, F32, 64),
      gguf.tensor("q", { 32, 1, 2 }, Q8_0, 64) },
      data = floats(1, 2, 3, 4, 5, 6) .. ("x"):rep(8) .. floats(7) .. ("x"):rep(28)
        .. ("\0"):rep(68) }
    assert.same({ "b", "a", "none", "q" }, file.names)
    assert.same({ { 2, 3 }, "F32", 24 }, { file:describe "b" })
    assert.same({ { 2, 1, 32 }, "Q8_0", 68 }, { file:describe "q" })
    assert.same({ { 3, 0 }, "F32", 0 }, { file:describe "none" })
    assert.same({ 1, 2, 3, 4, 5, 6 }, file:read("b", cpu):list())
    assert.same({ 7 }, file:read("a", cpu):list())
    assert.same({ 3, 0 }, file:read("none", cpu, "bf16"):dims())
    assert.is_true(file:has "a")
    assert.is_false(file:has "c")
    support.raises("no tensor \"nnoe\"; did you mean \"none\"?", file.read, file, "nnoe",
      cpu)
    support.raises("tensor \"b\" has shape [2, 3], expected [3, 2]", file.read, file, "b",
      cpu, "f32", { 3, 2 })
    support.raises("dtype is \"i32\", expected one of f32, f16, bf16", file.read, file,
      "b", cpu, "i32")
  end)

  support.each_device(function(dev)
    -- Bits are compared, because both compute the same sums in f32; -0 counts as 0.
    it("reads every type to the bit on " .. dev:name(), function()
      local file = kv.gguf(DATA .. "types.gguf")
      local expected = kv.safetensors(DATA .. "types.safetensors")
      for _, name in ipairs(file.names) do
        local shape, stored = file:describe(name)
        assert.equal(name, stored)
        local want = expected:read(name, dev)
        local numbers = want:list()
        assert.same(want:dims(), shape)
        assert.same(numbers, file:read(name, dev):list(), name)
        for _, dtype in ipairs { "f16", "bf16" } do
          assert.same(want:cast(dtype):list(), file:read(name, dev, dtype):list(), name)
        end
      end
      file:close()
      expected:close()
    end)
  end)

  it("reads tensors of any size, and again", function()
    for _, rows in ipairs { 1, 7, 8, 9, 2047, 2048, 2049, 5000 } do
      local n = 32 * rows
      local numbers = ffi.new("float[?]", n)
      for i = 0, n - 1 do numbers[i] = i % 8191 end
      local file = open { tensors = { gguf.tensor("x", { 32, rows }, F32, 0) },
                          data = ffi.string(numbers, 4 * n) }
      for _ = 1, 2 do
        assert.equal(0, ffi.C.memcmp(file:read("x", cpu):data(), numbers, 4 * n))
      end
      file:close()
    end
  end)

  it("opens files with types that it cannot read, and says so when asked", function()
    local file = open { tensors = { gguf.tensor("x", { 1 }, F32, 0),
      gguf.tensor("k", { 256 }, Q2_K, 32) }, data = floats(5) .. ("\0"):rep(112) }
    assert.equal(5, file:read("x", cpu):item())
    support.raises("tensor \"k\" is stored as Q2_K, expected F32, F16, BF16, Q8_0, Q4_0, "
      .. "Q4_1, Q5_0, Q5_1, Q4_K or Q6_K", file.read, file, "k", cpu)
  end)

  it("names what is wrong with a damaged file", function()
    local x, data = gguf.tensor("x", { 1 }, F32, 0), floats(1)
    local u32, u64, text = gguf.u32, gguf.u64, gguf.text
    local function entry(name, dims, rest) return text(name) .. u32(dims) .. rest end
    local cases = {
      { "begin with GGUF", { magic = "GGML" } },
      { "version 1, expected 2 or 3", { version = 1 } },
      { "version 4, expected 2 or 3", { version = 4 } },
      { "big-endian", { version = 0x3000000 } },
      { "more tensors or keys", { tensor_count = 2 ^ 60 } },
      { "more tensors or keys", { key_count = 2 ^ 40 } },
      { "tensor \"\": it does not end before the file does", { tensor_count = 1 } },
      { "key \"\": it does not end before the file does", { key_count = 1 } },
      { "key 0: it does not end", { keys = { text("abc", 2 ^ 63) } } },
      { "key \"s\": it does not end",
        { keys = { text "s" .. u32(8) .. text("", 2 ^ 62) } } },
      { "key \"a?b\": a kind that GGUF does not have",
        { keys = { text "a\nb" .. u32(13) } } },
      { "key \"k\": a kind", { keys = { text "k" .. u32(2 ^ 32 - 1) } } },
      { "key \"k\": an array of arrays",
        { keys = { text "k" .. u32(9) .. u32(9) .. u64(1) .. u32(4) .. u64(0) } } },
      { "key \"k\": a kind", { keys = { text "k" .. u32(9) .. u32(77) .. u64(0) } } },
      { "key \"k\": it does not end",
        { keys = { text "k" .. u32(9) .. u32(8) .. u64(2 ^ 28) } } },
      { "key \"k\": it does not end",
        { keys = { text "k" .. u32(9) .. u32(12) .. u64(2 ^ 61 + 1) } } },
      { "key \"k\": it does not end",
        { keys = { text "k" .. u32(9) .. u32(10) .. u64(2 ^ 20) } } },
      { "key \"k\": a boolean", { keys = { gguf.key("k", "bool", 2) } } },
      { "key \"k\": a boolean", { keys = { gguf.key("k", "bool", { 0, 1, 3 }) } } },
      { "key \"k\": it occurs twice",
        { keys = { gguf.key("k", "u8", 2), gguf.key("l", "u8", 2),
                   gguf.key("k", "u8", 2) } } },
      { "key \"general.alignment\": it is no power of two",
        { keys = { gguf.key("general.alignment", "u32", 48) } } },
      { "key \"general.alignment\": it is no power of two",
        { keys = { gguf.key("general.alignment", "u32", 0) } } },
      { "key \"general.alignment\": expected a u32",
        { keys = { gguf.key("general.alignment", "u64", 32) } } },
      { "key \"general.alignment\": expected a u32",
        { keys = { gguf.key("general.alignment", "u32", { 32 }) } } },
      { "tensor \"x\": its data lies outside", { tensors = { x } } },
      { "tensor \"x\": its data lies outside",
        { tensors = { gguf.tensor("x", { 1 }, F32, 32) }, data = data } },
      { "tensor \"x\": its data lies outside",
        { tensors = { gguf.tensor("x", { 1 }, F32, 2 ^ 63) }, data = data } },
      { "tensor \"x\": its data lies outside",
        { tensors = { gguf.tensor("x", { 0 }, F32, 2 ^ 62) }, data = data } },
      { "tensor \"x\": its offset is no multiple of the alignment",
        { tensors = { gguf.tensor("x", { 1 }, F32, 4) }, data = data .. data } },
      { "tensor \"y\": its data overlaps",
        { tensors = { x, gguf.tensor("y", { 1 }, F32, 0) }, data = data } },
      { "tensor \"x\": the name occurs twice",
        { tensors = { x, gguf.tensor("x", { 1 }, F32, 32) }, data = data:rep(9) } },
      { "tensor \"x?\": a zero byte in its name",
        { tensors = { gguf.tensor("x\0", { 1 }, F32, 0) }, data = data } },
      { "tensor \"x\": more than 4 dims",
        { tensors = { gguf.tensor("x", { 1, 1, 1, 1, 1 }, F32, 0) }, data = data } },
      { "tensor \"x\": more than 4 dims", { tensors = { entry("x", 2 ^ 32 - 1, "") } } },
      { "tensor \"x\": it does not end", { tensors = { entry("x", 2, u64(1)) } } },
      { "tensor \"x\": its shape has more than 2^63",
        { tensors = { gguf.tensor("x", { 2 ^ 62, 4 }, F32, 0) }, data = data } },
      { "tensor \"x\": its shape has more than 2^63",
        { tensors = { gguf.tensor("x", { 2 ^ 63 }, F32, 0) }, data = data } },
      { "tensor \"x\": its shape has more than 2^63",
        { tensors = { gguf.tensor("x", { 2 ^ 40, 2 ^ 21 }, F32, 0) }, data = data } },
      { "tensor \"x\": type 4, which", { tensors = { gguf.tensor("x", { 1 }, 4, 0) },
                                         data = data } },
      { "tensor \"x\": type ", { tensors = { gguf.tensor("x", { 1 }, 2 ^ 32 - 1, 0) },
                                 data = data } },
      { "tensor \"x\": rows of 33 numbers, but Q8_0 has them in blocks of 32",
        { tensors = { gguf.tensor("x", { 33, 32 }, Q8_0, 0) },
          data = ("\0"):rep(9999) } },
      { "tensor \"x\": a single number in blocks",
        { tensors = { gguf.tensor("x", {}, Q8_0, 0) }, data = ("\0"):rep(99) } },
    }
    for i, case in ipairs(cases) do
      local why = open_error(case[2])
      assert.truthy(why:find(case[1], 1, true), ("case %d: %s"):format(i, why))
    end
  end)

  it("names a file that is missing, too short or a folder", function()
    support.raises("No such file", kv.gguf, "/nonexistent/x")
    support.raises("regular", kv.gguf, "/")
    support.raises("0 bytes, expected at least 24", kv.gguf, temporary.file "")
    support.raises("gguf: path is nil, expected a string", kv.gguf, nil)
  end)

  --- Opens a text and reads what it holds. Whatever happens is no crash, and errors are
  -- in kvlab's own words.
  local path = temporary.in_memory()
  local function try(text)
    local written = assert(io.open(path, "wb"))
    written:write(text)
    written:close()
    local ok, file = pcall(kv.gguf, path)
    if not ok then
      assert.truthy(file:find(path, 1, true), file)
    else
      for _, name in ipairs(file.names) do
        local read, why = pcall(file.read, file, name, cpu)
        assert.truthy(read or why:find(name, 1, true) or why:find "memory"
          or why:find "bytes", why)
      end
      file:close()
    end
    return ok
  end

  it("survives every truncation of its header and some of its data", function()
    local text = files.read(DATA .. "types.gguf")
    local step = support.is_hostile and 7 or 1
    for cut = 0, 2200, step do assert.is_false(try(text:sub(1, cut)), cut) end
    for cut = 2201, #text - 200, 211 do assert.is_false(try(text:sub(1, cut)), cut) end
  end)

  it("survives damage anywhere", function()
    local text = files.read(DATA .. "types.gguf")
    local rng, opened = support.rng(17), 0
    for _ = 1, support.is_hostile and 2000 or 5000 do
      local damaged = ffi.new("uint8_t[?]", #text)
      ffi.copy(damaged, text, #text)
      for _ = 1, 1 + rng(4) do -- most of them in what is checked
        local at = rng(8) == 0 and rng(#text) or rng(2200)
        damaged[at] = ({ 0, 255, 127, 128, 1, rng(256) })[1 + rng(6)]
      end
      if try(ffi.string(damaged, #text)) then opened = opened + 1 end
    end
    assert.is_true(opened > 100) -- so that reading damaged data is tried, too
  end)

  it("gives back everything when memory runs out at any place", function()
    if not support.is_hostile then
      return pending "only in a hostile build can allocations be made to fail"
    end
    support.fails_each_allocation(function()
      return kv.gguf(DATA .. "types.gguf")
    end, 200)
  end)
end)
