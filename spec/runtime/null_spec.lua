--- Every function of runtime/kvlab.h, with NULL for each of its pointers in turn: it
-- returns (an error, or where that argument may be NULL a result), and does not crash.
local client = require "spec.http_client"
local compiler = require "kvlab.kernel.run.compiler"
local connections = require "kvlab.http.connections"
local ffi = require "ffi"
local kv = require "kvlab"
local processes = require "spec.processes"
local support = require "spec.support"
local gguf = require "spec.gguf_files"
local temporary = require "spec.temporary"

local C, fails = kv.C, support.fails

--- The prototypes, each with its name and the types of its parameters.
local function prototypes()
  local file = assert(io.open(kv.paths.root .. "/runtime/kvlab.h"))
  local text = file:read("*a"):match "ffi:begin.-\n(.-)/%* ffi:end"
  file:close()
  local list = {}
  text = text:gsub("/%*.-%*/", ""):gsub("\n", " ")
  for name, parameters in text:gmatch "(kvl_[%w_]+)(%b());" do
    local types = {}
    for parameter in parameters:sub(2, -2):gmatch "[^,]+" do
      types[#types + 1] = parameter:match "^%s*(.-)[%w_]*%s*$"
    end
    list[#list + 1] = { name = name, types = types }
  end
  return list
end

--- Code for a CPU that does nothing; nil where there is no C compiler.
local image = compiler.compile([[
__attribute__((visibility("default"))) int kvl_code(const void *a, void *queue) {
  return (void)a, (void)queue, 0;
}]], "plain")

--- Handles of all kinds in a child that never closes them: each is opened when it is
-- first asked for.
local function handles(dev)
  local known, makers = {}, {}
  setmetatable(known, { __index = function(_, kind)
    known[kind] = makers[kind] and makers[kind]()
    return rawget(known, kind)
  end })
  local function out(open, kind, ...)
    local pointer = ffi.new(kind .. " *[1]")
    local arguments, n = { ... }, select("#", ...) -- some are nil
    arguments[n + 1] = pointer
    kv.check(open(unpack(arguments, 1, n + 1)))
    return pointer[0]
  end
  local function opens(kind, ...)
    local arguments, n = { ... }, select("#", ...)
    makers[kind] = function()
      return out(C[kind .. "_open"], kind, unpack(arguments, 1, n))
    end
  end
  opens("kvl_pool", 8, 4, 0)
  opens("kvl_store", "memory:", 0, 1000)
  opens("kvl_stream", dev)
  opens("kvl_event", dev)
  opens("kvl_tables", 1, 1, 1, 4)
  if image then opens("kvl_code", dev, "code", image, #image) end
  function makers.kvl_device() return dev end
  function makers.kvl_tensor() return kv.zeros(dev, "f32", { 2, 2 }) end
  function makers.kvl_graph()
    kv.check(C.kvl_graph_begin(dev))
    return out(C.kvl_graph_end, "kvl_graph", dev)
  end
  function makers.kvl_sequence()
    return out(C.kvl_sequence_open, "kvl_sequence", known.kvl_pool, 1, 1)
  end
  function makers.kvl_ring()
    return out(C.kvl_ring_open, "kvl_ring", kv.zeros(dev, "f32", { 2, 2, 2, 1, 4, 8 }),
      nil, 1)
  end
  function makers.kvl_prefetch()
    return out(C.kvl_prefetch_open, "kvl_prefetch", dev, known.kvl_store,
      ffi.new("kvl_prefetch_options", { bytes_staging = 65536, workers = 1,
        max_pending = 4 }))
  end
  function makers.kvl_safetensors()
    local head = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    return out(C.kvl_safetensors_open, "kvl_safetensors", temporary.file(
      string.char(#head) .. ("\0"):rep(7) .. head .. "abcd"))
  end
  function makers.kvl_gguf()
    return out(C.kvl_gguf_open, "kvl_gguf", temporary.file(gguf.file {
      keys = { gguf.key("a", "u8", 1), gguf.key("b", "u8", 1) },
      tensors = { gguf.tensor("a", { 1 }, 0, 0), gguf.tensor("b", { 1 }, 0, 32) },
      data = ("\0"):rep(36) }))
  end
  function makers.kvl_http()
    local http = connections.open(client.options())
    client.connect(http.port):send(client.text("POST", "/", "body"))
    known.http = http
    known.kvl_http_exchange = processes.wait_until(function() return http:next(1e5) end,
      "a request").handle
    return http.handle
  end
  function makers.kvl_http_exchange()
    return known.kvl_http and rawget(known, "kvl_http_exchange")
  end
  return known
end

--- A right value of a type, or nil where there is none here.
local function value_of(type_, known)
  local kind = type_:match "kvl_[%w_]+"
  if not type_:find "*" then return 1 end
  if type_:find "char %*$" and type_:find "const" then return "memory:" end
  if type_:find "char %*const %*" then return ffi.new("const char *[1]", { "x" }) end
  if type_:find "kvl_%w+ %*const %*" then
    local pointee = type_:match "^const " or ""
    return ffi.new(pointee .. kind .. " *[1]", { known[kind] })
  end
  if type_:find "%*%*" then return ffi.new(kind .. " *[1]") end
  if kind and known[kind] then return known[kind] end
  if kind == "kvl_ticket" then return nil end
  return kind and ffi.new(kind .. "[4]")
    or ffi.cast(type_:gsub("const ", ""), ffi.new("int64_t[512]"))
end

-- These must not run: they end the process' devices or change how it runs.
local LEFT_OUT = { kvl_fail_allocation = true, kvl_interrupt = true }

describe("NULL", function()
  for _, prototype in ipairs(prototypes()) do
    local name, types = prototype.name, prototype.types
    for i, type_ in ipairs(types) do
      if type_:find "*" and not LEFT_OUT[name] then
        it(("is no crash as argument %d of %s"):format(i, name), function()
          if name == "kvl_code_launch" and not image then
            return pending "no C compiler"
          end
          local pid = processes.fork(function()
            local known, arguments = handles(kv.device "cpu"), {}
            for k = 1, #types do
              if k ~= i then arguments[k] = value_of(types[k], known) end
            end
            local keep = arguments
            C[name](unpack(arguments, 1, #types))
            assert(keep)
          end)
          assert.equal(0, processes.wait(pid))
        end)
      end
    end
  end

  it("is named in the error", function()
    local dev, out = kv.device "cpu", ffi.new "kvl_stream *[1]"
    fails(C.kvl_stream_open(nil, out), "kvl_stream_open: dev is NULL")
    fails(C.kvl_stream_open(dev, nil), "kvl_stream_open: out is NULL")
    fails(C.kvl_event_sync(nil), "kvl_event_sync: event is NULL")
    fails(C.kvl_sequence_length(nil), "kvl_sequence_length: seq is NULL")
    fails(C.kvl_paged_attention(nil), "kvl_paged_attention: call is NULL")
    fails(C.kvl_safetensors_open(nil, ffi.new "kvl_safetensors *[1]"),
      "kvl_safetensors_open: path is NULL")
  end)
end)
