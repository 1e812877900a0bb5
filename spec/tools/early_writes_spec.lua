--- tools/early_writes.lua: kernels that start early write nothing before they waited.
local ptx = require "spec.ptx"

--- A module with one kernel of these statements.
local function kernel(body)
  return (".version 9.0\n.target sm_90a\n.visible .entry _ZN3kvl4testEPi(\n"
    .. "\t.param .u64 p_0\n)\n.maxntid 32, 1, 1\n{\n\t.reg .pred \t%%p<3>;\n%s\n}\n")
    :format(body)
end

--- What the kernel writes early, in one line each.
local function writes(body, functions)
  local kernels = ptx.kernels((functions or "") .. kernel(body))
  assert.equal(1, #kernels)
  local list = {}
  for i, text in ipairs(kernels[1].writes) do list[i] = text:gsub("%s+", " ") end
  table.sort(list)
  return list, kernels[1].waits
end

local WAIT = "griddepcontrol.wait;\n"

describe("the check of early writes", function()
  it("finds each way to write before the wait", function()
    for _, text in ipairs {
      "st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4}", "st.u32 [%rd1+4], %r1",
      "red.global.add.u32 [%rd1], 1", "atom.add.u32 %r1, [%rd1], 1",
      "atom.global.cas.b32 %r1, [%rd1], %r2, %r3",
      "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 16",
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r1], 16",
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3]",
      "multimem.red.relaxed.sys.global.add.u32 [%rd1], %r1",
      "discard.global.L2 [%rd1], 128", "st.release.gpu.b32 [%rd1], %r1",
    } do
      assert.same({ text }, (writes(text .. ";\n" .. WAIT .. "ret;")))
      assert.same({ text }, (writes("@!%p1 " .. text .. ";\n" .. WAIT .. "ret;")))
      assert.same({}, (writes(WAIT .. text .. ";\nret;")))
    end
  end)

  it("lets a kernel write its own memory and ask for copies into it", function()
    for _, text in ipairs {
      "st.shared.u32 [%r1], 0", "st.local.v2.u32 [%rd1], {%r1, %r2}",
      "st.param.b64 [param0], %rd1", "atom.shared.add.u32 %r1, [%r2], 1",
      "st.shared::cluster.u32 [%r1], 0", "cp.async.cg.shared.global [%r1], [%rd1], 16",
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], "
        .. "16, [%r2]",
      "cp.async.bulk.prefetch.L2.global [%rd1], 16", "prefetch.global.L2 [%rd1]",
      "red.async.relaxed.cluster.shared::cluster.add.u32 [%r1], 1",
      "mbarrier.arrive.shared::cta.b64 _, [%r1]", "ld.global.u32 %r1, [%rd1]",
    } do
      assert.same({}, (writes(text .. ";\n" .. WAIT .. "ret;")))
    end
  end)

  it("follows branches, loops, tables of branches and calls", function()
    local store = "st.global.u32 [%rd1], 0;\n"
    local found = { "st.global.u32 [%rd1], 0" }
    local around = "@%p1 bra $A;\n" .. WAIT .. "$A:\n" .. store .. "ret;"
    assert.same(found, (writes(around)))
    local behind = "bra.uni $W;\n$S:\n" .. store .. "ret;\n$W:\n" .. WAIT .. "bra $S;"
    assert.same({}, (writes(behind)))
    local loop = "$L:\n@%p1 bra $W;\n" .. store .. "bra.uni $L;\n$W:\n" .. WAIT .. "ret;"
    assert.same(found, (writes(loop)))
    local cases = "$T: .branchtargets $A, $B;\n@%p1 bra $A;\nbrx.idx %r1, $T;\n$A:\n"
      .. WAIT .. store .. "ret;\n$B:\n"
    assert.same({}, (writes(cases .. WAIT .. store .. "ret;")))
    assert.same(found, (writes(cases .. store .. "ret;")))
    assert.same(found, (writes("@%p1 " .. WAIT .. store .. "ret;")))
    assert.same({}, (writes("ret;\n" .. store))) -- nobody comes there
    local called = "{\n.param .b64 param0;\nst.param.b64 [param0], %rd1;\n"
      .. "call.uni (retval0),\nhelp,\n(\nparam0\n);\n}\n"
    local function help(body)
      return ".func (.param .b32 func_retval0) help(\n.param .b64 help_0\n)\n{\n" .. body
        .. "ret;\n}\n"
    end
    assert.same({ "st.global.u32 [%rd1], 0 in help" },
      (writes(called .. WAIT .. "ret;", help(store))))
    assert.same({}, (writes(called .. store .. "ret;", help(WAIT))))
    assert.same({}, (writes(WAIT .. called .. "ret;", help(store))))
    assert.equal(1, #writes(called .. WAIT .. "ret;")) -- a function that is not there
  end)

  it("keeps labels of two pieces of inline assembly apart", function()
    local piece = "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, "
      .. "[%r1], 0;\n@!p bra AGAIN;\n}\n"
    assert.same({}, (writes(piece .. WAIT .. piece .. "st.global.u32 [%rd1], 0;\nret;")))
  end)

  it("reads a kernel with line numbers", function()
    local loc = "\n\t.loc\t1 23 5, function_name $L__info_string0, inlined_at 1 9 3\n"
    assert.same({ "st.global.u32 [%rd1], 0" }, (writes("bra.uni $A;" .. loc .. WAIT
      .. loc .. "$A:" .. loc .. "st.global.u32 [%rd1], 0;" .. loc .. WAIT .. "ret;")))
  end)

  it("refuses an instruction that it does not know", function()
    assert.has_error(function() writes("scribble.global.u32 [%rd1], 0;\nret;") end,
      "PTX instruction scribble.global.u32 is not known")
  end)

  it("tells kernels that wait from those that never do", function()
    local _, waits = writes(WAIT .. "ret;")
    assert.is_true(waits)
    _, waits = writes("ret;\n" .. WAIT)
    assert.is_false(waits)
  end)

  it("finds kernels that are launched early and never wait", function()
    assert.equal("fill_rows", ptx.source_name
      "_ZN3kvl39_GLOBAL__N__ac8c1fb8_4_fill_cu_e3a0a4a89fill_rowsILi4EfEEvPT0_l")
    assert.equal("start", ptx.source_name "_Z5startPi")
    local never = { slow = true, late = true }
    local function launched(source) return ptx.launched_early(source, never) end
    assert.same({ slow = true },
      launched "int f() {\n  return launch_programmatic(slow<4>, 1, 32, 0, q);\n}\n")
    assert.same({ late = true }, launched(
      "int f() {\n  auto kernel = x ? late<8> : quick<1>;\n"
      .. "  return launch_clusters(kernel, 2, 1, 32, 0, q);\n}\n"))
    assert.same({}, launched(
      "int f() {\n  launch_programmatic(quick<4>, 1, 32);\n  slow<<<1, 32>>>();\n}\n"
      .. "int g() {\n  auto kernel = late<2>;\n  kernel<<<1, 32>>>();\n}\n"))
  end)
end)
