--- The C library without the conveniences of Lua: what a C program relies on.
local ffi = require "ffi"
local kv = require "kvlab"
local support = require "spec.support"
local temporary = require "spec.temporary"
local C, fails, raises = kv.C, support.fails, support.raises

describe("status", function()
  it("has words for every value, and for none of its own", function()
    local seen = {}
    for status = 0, -8, -1 do
      local text = ffi.string(C.kvl_status_text(status))
      assert.is_nil(seen[text])
      assert.not_equal("unknown status", text)
      seen[text] = true
    end
    assert.equal("unknown status", ffi.string(C.kvl_status_text(-99)))
    assert.equal("ok", ffi.string(C.kvl_status_text(3)))
  end)

  it("stops no op of a thread that holds interrupts", function()
    C.kvl_interrupt(1)
    assert.equal(1, C.kvl_interrupt_hold(1))
    assert.equal(0, C.kvl_interrupted())
    assert.equal(0, C.kvl_interrupt_hold(-1))
    assert.equal(1, C.kvl_interrupted())
    C.kvl_interrupt(0)
  end)

  it("stops every op while the interrupt flag is set", function()
    local t = kv.zeros(kv.device "cpu", "f32", { 4 })
    C.kvl_interrupt(1)
    local status = C.kvl_fill(t, 1)
    C.kvl_interrupt(0)
    assert.equal(C.KVL_ERR_INTERRUPTED, status)
    assert.equal(0, t:max():item())
  end)
end)

describe("device handle", function()
  it("is counted: tensors keep using it until the last close", function()
    local out = ffi.new "kvl_device *[1]"
    kv.check(C.kvl_device_open("cpu", out))
    assert.equal(kv.device "cpu", out[0])
    C.kvl_device_close(out[0])
    assert.equal(2, kv.full(kv.device "cpu", "f32", { 1 }, 2):item())
  end)
end)

describe("lent memory", function()
  it("is read and written in place and never freed", function()
    local memory = ffi.new("float[6]", { 1, 2, 3, 4, 5, 6 })
    local shape = ffi.new("int64_t[6]", { 2, 3 })
    local t = ffi.new "kvl_tensor"
    kv.check(C.kvl_tensor_wrap(kv.device "cpu", C.KVL_DTYPE_F32, 2, shape, memory, t))
    assert.same({ 2, 3 }, t:dims())
    local row = t:index(1)
    t:free()
    row:mul(10, row)
    row:free()
    assert.equal(3, memory[2])
    assert.equal(60, memory[5])
    assert.equal(C.KVL_ERR_INVALID,
      C.kvl_tensor_wrap(kv.device "cpu", C.KVL_DTYPE_F32, 2, shape, nil, t))
  end)
end)

local function check_graph(dev)
  local out = ffi.new "kvl_graph *[1]"

  it("is made by one end for one begin", function()
    fails(C.kvl_graph_end(dev, out), "graph: none is being recorded on " .. dev:name())
    kv.check(C.kvl_graph_begin(dev))
    fails(C.kvl_graph_begin(dev), "graph is being recorded", "recording another one")
    assert.equal(1, C.kvl_device_is_recording(dev))
    kv.check(C.kvl_graph_end(dev, out))
    assert.equal(0, C.kvl_device_is_recording(dev))
    fails(C.kvl_graph_end(dev, out), "none is being recorded")
    C.kvl_graph_close(out[0])
    C.kvl_graph_close(nil)
    fails(C.kvl_graph_replay(nil), "graph: it is closed")
  end)

  it("is not replayed while another one is recorded", function()
    local x = kv.zeros(dev, "f32", { 4 })
    kv.check(C.kvl_graph_begin(dev))
    kv.check(C.kvl_fill(x, 1))
    kv.check(C.kvl_graph_end(dev, out))
    local graph = out[0]
    kv.check(C.kvl_graph_begin(dev))
    local status = C.kvl_graph_replay(graph)
    kv.check(C.kvl_graph_end(dev, out))
    fails(status, "replaying another one needs the host")
    kv.check(C.kvl_graph_replay(out[0])) -- of nothing
    C.kvl_graph_close(out[0])
    assert.equal(0, x:max():item())
    kv.check(C.kvl_graph_replay(graph))
    assert.equal(1, x:max():item())
    C.kvl_graph_close(graph)
  end)

  it("is not made by an op that fails, and the recording goes on", function()
    local x = kv.zeros(dev, "f32", { 4 })
    kv.check(C.kvl_graph_begin(dev))
    fails(C.kvl_fill(nil, 1), "missing")
    C.kvl_interrupt(1)
    fails(C.kvl_fill(x, 7), "interrupted")
    C.kvl_interrupt(0)
    kv.check(C.kvl_fill(x, 3))
    kv.check(C.kvl_graph_end(dev, out))
    C.kvl_interrupt(1)
    local status = C.kvl_graph_replay(out[0])
    C.kvl_interrupt(0)
    assert.equal(C.KVL_ERR_INTERRUPTED, status)
    assert.equal(0, x:max():item())
    kv.check(C.kvl_graph_replay(out[0]))
    assert.equal(3, x:min():item())
    C.kvl_graph_close(out[0])
  end)
end

local function check_ring(dev)
  local out = ffi.new "kvl_ring *[1]"
  local function memory(...) return kv.zeros(dev, "f32", { ... }) end

  it("is not made of wrong memory, and the out parameter stays", function()
    local none = ffi.cast("kvl_ring *", 8)
    out[0] = none
    local good, closed = memory(2, 1, 2, 1, 4, 8), memory(2, 1, 2, 1, 4, 8)
    closed:free()
    fails(C.kvl_ring_open(nil, nil, 1, out), "ring: memory is missing")
    fails(C.kvl_ring_open(closed, nil, 1, out), "ring: memory is closed")
    fails(C.kvl_ring_open(memory(2, 2, 1, 4, 8), nil, 1, out), "ring: memory is f32")
    fails(C.kvl_ring_open(kv.zeros(dev, "i32", { 2, 1, 2, 1, 4, 8 }), nil, 1, out), "i32")
    fails(C.kvl_ring_open(memory(2, 0, 2, 1, 4, 8), nil, 1, out), "slots of 0 blocks")
    fails(C.kvl_ring_open(memory(0, 1, 2, 1, 4, 8), nil, 1, out), "0 slots and 1 layers")
    for _, layers in ipairs { 0, -1 } do
      fails(C.kvl_ring_open(good, nil, layers, out), ("and %d layers"):format(layers))
    end
    raises("opening a ring needs the host", kv.graph, function()
      kv.check(C.kvl_ring_open(good, nil, 1, out))
    end, dev)
    assert.equal(none, out[0])
  end)

  it("may be NULL: every call says so", function()
    local far, list = memory(2, 2, 1, 4, 8), kv.zeros(dev, "i32", { 1, 1, 1 })
    local bytes, span = ffi.new "int64_t[2]", ffi.new "kvl_span[1]"
    local null = ffi.new "int32_t *"
    for name, arguments in pairs {
      load = { 0, 0, far, null, 0 }, gather = { 0, 0, far, list, list }, planned = {},
      wait = { 0 }, done = { 0 }, offload = { 0, far, list, far, list, null },
      wait_offload = { 0 }, bytes = { bytes, bytes + 1 }, trace = { 1 },
      trace_get = { span, 1 },
    } do
      fails(C["kvl_ring_" .. name](nil, unpack(arguments)), "the ring is closed")
    end
    fails(C.kvl_ring_wait(nil, C.KVL_RING_BUFFER), "the ring is closed")
    fails(C.kvl_ring_done(nil, C.KVL_RING_BUFFER), "the ring is closed")
    C.kvl_ring_close(nil)
  end)

  it("refuses wrong slots, layers, tensors and blocks", function()
    local far = kv.pinned(dev, "f32", { 5, 2, 1, 4, 8 }):fill_(1)
    local near, other = memory(2, 3, 2, 1, 4, 8), memory(5, 2, 1, 4, 16)
    local list, closed = kv.zeros(dev, "i32", { 1, 1, 2 }), memory(5, 2, 1, 4, 8)
    closed:free()
    kv.check(C.kvl_ring_open(near, nil, 2, out))
    local ring, blocks = ffi.gc(out[0], C.kvl_ring_close), ffi.new("int32_t[4]", 0, 4, 5)
    local function load(slot, layer, cache, n)
      return C.kvl_ring_load(ring, slot, layer, cache, blocks, n)
    end
    fails(load(2, 0, far, 1), "ring_load: slot is 2, expected 0 ... 1")
    fails(load(C.KVL_RING_BUFFER, 0, far, 1), "ring_load: slot is -1")
    fails(load(0, 2, far, 1), "ring_load: layer is 2, expected 0 ... 1")
    fails(load(0, 0, far, -1), "-1 blocks, expected 0 ... 3")
    fails(load(0, 0, far, 4), "4 blocks, expected 0 ... 3")
    fails(load(0, 0, far, 3), "block 2 is 5, expected 0 ... 4")
    fails(C.kvl_ring_load(ring, 0, 0, far, nil, 1), "blocks are missing")
    kv.check(C.kvl_ring_load(ring, 0, 0, far, nil, 0))
    fails(load(0, 0, nil, 1), "ring_load: cache is missing")
    fails(load(0, 0, closed, 1), "ring_load: cache is closed")
    fails(load(0, 0, other, 1), "ring_load: cache is f32 [5, 2, 1, 4, 16]")
    fails(C.kvl_ring_gather(ring, 0, 0, far, nil, list), "ring_gather: from is missing")
    fails(C.kvl_ring_gather(ring, 0, 0, far, closed, list), "from is missing")
    fails(C.kvl_ring_gather(ring, 0, 0, far, list, nil), "to is missing")
    fails(C.kvl_ring_gather(ring, 0, 0, nil, list, list), "src is missing")
    fails(C.kvl_ring_gather(ring, 0, 0, other, list, list), "dst is f32 [3, 2, 1, 4, 8]")
    fails(C.kvl_ring_gather(ring, 0, -1, far, list, list), "layer is -1")
    fails(C.kvl_ring_wait(ring, 2), "ring_wait: slot is 2")
    fails(C.kvl_ring_done(ring, -2), "ring_done: slot is -2")
    fails(C.kvl_ring_offload(ring, 0, nil, list, far, list, nil), "cache is missing")
    fails(C.kvl_ring_offload(ring, 0, near, list, far, list, nil), "cache is f32 [2, 3")
    fails(C.kvl_ring_offload(ring, 0, far, list, far, closed, nil), "to is missing")
    fails(C.kvl_ring_offload(ring, 0, far, nil, far, list, nil), "from is missing")
    fails(C.kvl_ring_wait_offload(ring, 2), "layer is 2")
    near:free() -- the ring retains it
    kv.check(load(1, 1, far, 2))
    kv.check(C.kvl_ring_wait(ring, 1))
    assert.equal(0, kv.check(C.kvl_ring_trace_get(ring, nil, 0)))
    kv.check(C.kvl_ring_trace(ring, -1))
    C.kvl_ring_close(ffi.gc(ring, nil))
  end)

  --- fn(five blocks in pinned memory) with a stream current that is busy for a while.
  local function while_busy(fn)
    local busy = kv.randn(dev, "f32", { 512, 512 }, { seed = 1 })
    local product = kv.tensor(dev, "f32", { 512, 512 })
    local stream, far = dev:open_stream(), kv.pinned(dev, "f32", { 5, 2, 1, 4, 8 })
    dev:sync()
    dev:with_stream(stream, function()
      for _ = 1, 20 do busy:matmul(busy, product) end
      fn(far)
    end)
    stream:close()
  end

  it("loads what was written before kvl_ring_planned", function()
    local near, block = memory(2, 1, 2, 1, 4, 8), ffi.new("int32_t[1]", 3)
    local from = kv.from(dev, "i32", { 1, 1, 1 }, { 4 })
    local to = kv.zeros(dev, "i32", { 1, 1, 1 })
    while_busy(function(far)
      kv.check(C.kvl_ring_open(near, nil, 1, out))
      far:fill_(7)
      kv.check(C.kvl_ring_planned(out[0]))
      kv.check(C.kvl_ring_load(out[0], 0, 0, far, block, 1))
      kv.check(C.kvl_ring_gather(out[0], 1, 0, far, from, to))
      C.kvl_ring_close(out[0]) -- waits for both
    end)
    assert.equal(7, near:min():item())
  end)

  it("keeps lists and memory that were freed under a gather", function()
    local near = memory(1, 1, 2, 1, 4, 8)
    while_busy(function(far)
      kv.check(C.kvl_ring_open(near, nil, 1, out))
      far:arange_()
      local from = kv.full(dev, "i32", { 1, 1, 1 }, 4)
      local to = kv.full(dev, "i32", { 1, 1, 1 }, 0)
      kv.check(C.kvl_ring_planned(out[0]))
      kv.check(C.kvl_ring_gather(out[0], 0, 0, far, from, to))
      from:free()
      to:free()
      local others = { kv.full(dev, "i32", { 1 }, -1), kv.full(dev, "i32", { 1 }, -1) }
      far:free()
      C.kvl_ring_close(out[0])
      assert.equal(-2, others[1]:item() + others[2]:item())
    end)
    support.equal(near, kv.arange(dev, "f32", 64, 4 * 64))
  end)

  it("loads from memory that is not pinned, too", function()
    local far = memory(3, 2, 1, 4, 8):arange_()
    local near, block = memory(1, 2, 2, 1, 4, 8), ffi.new("int32_t[2]", 2, 0)
    kv.check(C.kvl_ring_open(near, nil, 1, out))
    kv.check(C.kvl_ring_load(out[0], 0, 0, far, block, 2))
    kv.check(C.kvl_ring_wait(out[0], 0))
    support.equal(near:reshape({ 2, 64 }):index(0), far:index(2):reshape { 64 })
    support.equal(near:reshape({ 2, 64 }):index(1), far:index(0):reshape { 64 })
    C.kvl_ring_close(out[0])
  end)
end

support.each_device(function(dev)
  describe("graph handle on " .. dev:name(), function() check_graph(dev) end)
  describe("ring handle on " .. dev:name(), function() check_ring(dev) end)
end)

describe("kvlab.h #slow", function()
  --- The example in the header's first comment, inside a main.
  local function example()
    local file = assert(io.open(kv.paths.root .. "/runtime/kvlab.h"))
    local text = file:read "*a"
    file:close()
    local first, last = text:find "kvl_device %*dev;.-kvl_device_close%(dev%);"
    local body = text:sub(first, last):gsub("\n %*", "\n")
    return ("#include <stdio.h>\n#include \"kvlab.h\"\nint main(void) {\n%s\n}\n"):format(
      body)
  end

  for language, compiler in pairs { c = "gcc -std=c17 -xc", ["c++"] = "g++ -xc++" } do
    it("compiles and its example runs in " .. language, function()
      if os.execute(compiler:match "^%S+" .. " --version >/dev/null 2>&1") ~= 0
         or kv.paths.config == "hostile" or kv.paths.config == "bundle" then
        return pending "no compiler for this build"
      end
      local source, binary = temporary.file(example()), temporary.path()
      local command = ("%s -Wall -Werror -I'%s/runtime' -o %s %s -xnone '%s/libkvlab.so' "
        .. "-Wl,-rpath,'%s' 2>&1 && %s"):format(compiler, kv.paths.root, binary, source,
        kv.paths.library_dir, kv.paths.library_dir, binary)
      local pipe = io.popen(command)
      local output = pipe:read "*a"
      pipe:close()
      assert.equal("", output)
    end)
  end
end)
