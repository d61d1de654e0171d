#include "kernels/cpu/matmul_onednn.h"

#include <omp.h>
#include <oneapi/dnnl/dnnl.h>

#include <array>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "kernels/cpu/isolated_library.h"
#include "kernels/cpu/product_probe.h"
#include "tranche/core/error.h"

namespace tranche::kernels::cpu {

namespace {

/// The functions of oneDNN that are called here.
struct OneDnn {
  decltype(&dnnl_engine_create) engine_create;
  decltype(&dnnl_engine_destroy) engine_destroy;
  decltype(&dnnl_get_effective_cpu_isa) get_effective_cpu_isa;
  decltype(&dnnl_matmul_desc_init) matmul_desc_init;
  decltype(&dnnl_memory_create) memory_create;
  decltype(&dnnl_memory_desc_get_size) memory_desc_get_size;
  decltype(&dnnl_memory_desc_init_by_strides) memory_desc_init_by_strides;
  decltype(&dnnl_memory_destroy) memory_destroy;
  decltype(&dnnl_post_ops_append_sum) post_ops_append_sum;
  decltype(&dnnl_post_ops_create) post_ops_create;
  decltype(&dnnl_post_ops_destroy) post_ops_destroy;
  decltype(&dnnl_primitive_attr_create) primitive_attr_create;
  decltype(&dnnl_primitive_attr_destroy) primitive_attr_destroy;
  decltype(&dnnl_primitive_attr_set_post_ops) primitive_attr_set_post_ops;
  decltype(&dnnl_primitive_attr_set_scratchpad_mode) primitive_attr_set_scratchpad_mode;
  decltype(&dnnl_primitive_create) primitive_create;
  decltype(&dnnl_primitive_desc_create) primitive_desc_create;
  decltype(&dnnl_primitive_desc_destroy) primitive_desc_destroy;
  decltype(&dnnl_primitive_desc_query_md) primitive_desc_query_md;
  decltype(&dnnl_primitive_destroy) primitive_destroy;
  decltype(&dnnl_primitive_execute) primitive_execute;
  decltype(&dnnl_sgemm) sgemm;
  decltype(&dnnl_stream_create) stream_create;
  decltype(&dnnl_stream_destroy) stream_destroy;
  decltype(&dnnl_stream_wait) stream_wait;
  decltype(&dnnl_version) version;
};

OneDnn load() {
  const IsolatedLibrary library({TRANCHE_ONEDNN_PATH, "libdnnl.so." + std::to_string(DNNL_VERSION_MAJOR)},
                                "oneDNN " + std::to_string(DNNL_VERSION_MAJOR) + " (Debian: libdnnl-dev)");
  OneDnn f{};
  const auto find = [&](auto& function, const char* name) { library.find(function, name); };
  find(f.engine_create, "dnnl_engine_create");
  find(f.engine_destroy, "dnnl_engine_destroy");
  find(f.get_effective_cpu_isa, "dnnl_get_effective_cpu_isa");
  find(f.matmul_desc_init, "dnnl_matmul_desc_init");
  find(f.memory_create, "dnnl_memory_create");
  find(f.memory_desc_get_size, "dnnl_memory_desc_get_size");
  find(f.memory_desc_init_by_strides, "dnnl_memory_desc_init_by_strides");
  find(f.memory_destroy, "dnnl_memory_destroy");
  find(f.post_ops_append_sum, "dnnl_post_ops_append_sum");
  find(f.post_ops_create, "dnnl_post_ops_create");
  find(f.post_ops_destroy, "dnnl_post_ops_destroy");
  find(f.primitive_attr_create, "dnnl_primitive_attr_create");
  find(f.primitive_attr_destroy, "dnnl_primitive_attr_destroy");
  find(f.primitive_attr_set_post_ops, "dnnl_primitive_attr_set_post_ops");
  find(f.primitive_attr_set_scratchpad_mode, "dnnl_primitive_attr_set_scratchpad_mode");
  find(f.primitive_create, "dnnl_primitive_create");
  find(f.primitive_desc_create, "dnnl_primitive_desc_create");
  find(f.primitive_desc_destroy, "dnnl_primitive_desc_destroy");
  find(f.primitive_desc_query_md, "dnnl_primitive_desc_query_md");
  find(f.primitive_destroy, "dnnl_primitive_destroy");
  find(f.primitive_execute, "dnnl_primitive_execute");
  find(f.sgemm, "dnnl_sgemm");
  find(f.stream_create, "dnnl_stream_create");
  find(f.stream_destroy, "dnnl_stream_destroy");
  find(f.stream_wait, "dnnl_stream_wait");
  find(f.version, "dnnl_version");
  return f;
}

/// The library is loaded and tested at its first use.
const OneDnn& onednn() {
  static const OneDnn functions = [] {
    const OneDnn made = load();
    probe_product("oneDNN", [&](const float* a, const float* b, float* c, std::int64_t n) {
      return made.sgemm('N', 'N', n, n, n, 1, a, n, b, n, 0, c, n) == dnnl_success;
    });
    return made;
  }();
  return functions;
}

void require(dnnl_status_t status, const char* what) {
  if (status != dnnl_success) {
    throw Error(std::string("oneDNN failed to ") + what + " (status " + std::to_string(status) + ")");
  }
}

/// Owns an object of oneDNN's.
template <auto destroy>
struct Destroyer {
  template <class Object>
  void operator()(Object* object) const {
    (onednn().*destroy)(object);
  }
};
using EngineOwner = std::unique_ptr<dnnl_engine, Destroyer<&OneDnn::engine_destroy>>;
using StreamOwner = std::unique_ptr<dnnl_stream, Destroyer<&OneDnn::stream_destroy>>;
using Attributes = std::unique_ptr<dnnl_primitive_attr, Destroyer<&OneDnn::primitive_attr_destroy>>;
using PostOperations = std::unique_ptr<dnnl_post_ops, Destroyer<&OneDnn::post_ops_destroy>>;
using Description = std::unique_ptr<dnnl_primitive_desc, Destroyer<&OneDnn::primitive_desc_destroy>>;
using Primitive = std::unique_ptr<dnnl_primitive, Destroyer<&OneDnn::primitive_destroy>>;
using Memory = std::unique_ptr<dnnl_memory, Destroyer<&OneDnn::memory_destroy>>;

bool has(dnnl_cpu_isa_t held, dnnl_cpu_isa_t wanted) {
  const auto bits = static_cast<unsigned>(wanted);
  return (static_cast<unsigned>(held) & bits) == bits;
}

/// The name of the instructions that multiply bf16; empty when the hardware has none: oneDNN would then
/// emulate it on AVX-512, slower than our own widening.
std::string_view bf16_instructions() {
  const dnnl_cpu_isa_t isa = onednn().get_effective_cpu_isa();
  if (has(isa, dnnl_cpu_isa_avx512_core_amx)) return "avx512_core_amx";
  if (has(isa, dnnl_cpu_isa_avx512_core_bf16)) return "avx512_core_bf16";
  return {};
}

/// Cores that have fp16 arithmetic beside bf16 were designed with a matrix unit for bf16.
bool made_with_matrix_unit() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  return __builtin_cpu_supports("avx512fp16") != 0;
#else
  return false;
#endif
}

/// True when oneDNN's bf16 GEMM is known to be right for the shape on every CPU. Its matrix-unit (AMX)
/// kernels have failed for sums that do not fill whole steps of 32 and for single rows: illegal instructions
/// at 1 x 80 x 63 (oneDNN issue 1661, version 2.7), values leaked between rows when k is no multiple of 32
/// (issue 5717, still in 3.14). Both are rare in training and cheap to widen, so no CPU uses oneDNN for them:
/// otherwise some CPUs would run code that others never test.
bool is_reliable(const MatmulCall& call) {
  constexpr std::int64_t tile_rows = 16, tile_depth = 32;
  return call.m >= tile_rows && call.n >= tile_rows && call.k % tile_depth == 0;
}

/// oneDNN reads the number of threads from the calling thread's OpenMP setting, both when it creates a
/// primitive and when it runs one.
class ThreadsInForce {
 public:
  explicit ThreadsInForce(int threads) : before_(omp_get_max_threads()) { omp_set_num_threads(threads); }
  ~ThreadsInForce() { omp_set_num_threads(before_); }
  ThreadsInForce(const ThreadsInForce&) = delete;
  ThreadsInForce& operator=(const ThreadsInForce&) = delete;

 private:
  int before_;
};

using Key = std::tuple<bool, bool, bool, bool, std::int64_t, std::int64_t, std::int64_t, int>;

struct Prepared {
  Primitive primitive;  ///< null if oneDNN has none
  dnnl_memory_desc_t a{}, b{}, c{}, scratchpad{};
  std::int64_t scratchpad_bytes = 0;
};

dnnl_memory_desc_t matrix(std::int64_t rows, std::int64_t columns, dnnl_data_type_t type, bool transposed) {
  const dnnl_dims_t dims = {rows, columns};
  const dnnl_dims_t strides = {transposed ? 1 : columns, transposed ? rows : 1};
  dnnl_memory_desc_t made;
  require(onednn().memory_desc_init_by_strides(&made, 2, dims, type, strides), "describe a matrix");
  return made;
}

/// The primitives created by one thread; creating one costs far more than finding it again.
class Primitives {
 public:
  const Prepared& find(const MatmulCall& call) {
    const Key key{call.transpose_a, call.transpose_b, call.accumulate, call.c_dtype == DataType::float32,
                  call.m,           call.n,           call.k,          call.threads};
    if (const auto found = prepared_.find(key); found != prepared_.end()) return found->second;
    if (prepared_.size() >= most_primitives) prepared_.clear();
    return prepared_.emplace(key, prepare(call)).first->second;
  }
  void run(const Prepared& prepared, const MatmulCall& call) {
    const OneDnn& f = onednn();
    const auto memory = [&](const dnnl_memory_desc_t& description, const void* data) {
      dnnl_memory_t made = nullptr;
      require(f.memory_create(&made, &description, engine_, const_cast<void*>(data)), "take a matrix");
      return Memory(made);
    };
    const Memory a = memory(prepared.a, call.a), b = memory(prepared.b, call.b),
                 c = memory(prepared.c, call.c),
                 scratchpad = memory(prepared.scratchpad, call.workspace.data);
    const std::array<dnnl_exec_arg_t, 4> arguments{{{DNNL_ARG_SRC, a.get()},
                                                    {DNNL_ARG_WEIGHTS, b.get()},
                                                    {DNNL_ARG_DST, c.get()},
                                                    {DNNL_ARG_SCRATCHPAD, scratchpad.get()}}};
    require(f.primitive_execute(prepared.primitive.get(), stream_, static_cast<int>(arguments.size()),
                                arguments.data()),
            "multiply");
    require(f.stream_wait(stream_), "finish a product");
  }

 private:
  static constexpr std::size_t most_primitives = 1024;

  Prepared prepare(const MatmulCall& call) {
    const OneDnn& f = onednn();
    Prepared made;
    made.a = matrix(call.m, call.k, dnnl_bf16, call.transpose_a);
    made.b = matrix(call.k, call.n, dnnl_bf16, call.transpose_b);
    made.c = matrix(call.m, call.n, call.c_dtype == DataType::float32 ? dnnl_f32 : dnnl_bf16, false);
    dnnl_primitive_attr_t attributes = nullptr;
    require(f.primitive_attr_create(&attributes), "make attributes");
    const Attributes own_attributes(attributes);
    require(f.primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user), "set an attribute");
    if (call.accumulate) {
      dnnl_post_ops_t sum = nullptr;
      require(f.post_ops_create(&sum), "make attributes");
      const PostOperations own_sum(sum);
      require(f.post_ops_append_sum(sum, 1), "set an attribute");
      require(f.primitive_attr_set_post_ops(attributes, sum), "set an attribute");
    }
    dnnl_matmul_desc_t matmul;
    require(f.matmul_desc_init(&matmul, &made.a, &made.b, nullptr, &made.c), "describe a product");
    dnnl_primitive_desc_t description = nullptr;
    if (f.primitive_desc_create(&description, &matmul, attributes, engine_, nullptr) != dnnl_success)
      return made;
    const Description own_description(description);
    made.scratchpad = *f.primitive_desc_query_md(description, dnnl_query_scratchpad_md, 0);
    made.scratchpad_bytes = static_cast<std::int64_t>(f.memory_desc_get_size(&made.scratchpad));
    dnnl_primitive_t primitive = nullptr;
    require(f.primitive_create(&primitive, description), "make a product");
    made.primitive.reset(primitive);
    return made;
  }
  static dnnl_engine_t make_engine() {
    dnnl_engine_t made = nullptr;
    require(onednn().engine_create(&made, dnnl_cpu, 0), "start");
    return made;
  }
  static dnnl_stream_t make_stream(dnnl_engine_t engine) {
    dnnl_stream_t made = nullptr;
    require(onednn().stream_create(&made, engine, dnnl_stream_default_flags), "start");
    return made;
  }

  EngineOwner engine_owner_{make_engine()};
  dnnl_engine_t engine_ = engine_owner_.get();
  StreamOwner stream_owner_{make_stream(engine_)};
  dnnl_stream_t stream_ = stream_owner_.get();
  std::map<Key, Prepared> prepared_;
};

}  // namespace

bool onednn_matmul(const MatmulCall& call) {
  if (bf16_instructions().empty() || !is_reliable(call)) return false;
  thread_local Primitives primitives;
  const ThreadsInForce threads(call.threads);
  const Prepared& prepared = primitives.find(call);
  if (prepared.primitive == nullptr || prepared.scratchpad_bytes > call.workspace.bytes) return false;
  primitives.run(prepared, call);
  return true;
}

bool onednn_bf16_is_fast() {
  const std::string_view instructions = bf16_instructions();
  return instructions == "avx512_core_amx" || (!instructions.empty() && !made_with_matrix_unit());
}

bool onednn_has_sgemm() {
  return has(onednn().get_effective_cpu_isa(), dnnl_cpu_isa_avx2);
}

bool onednn_has_wide_sgemm() {
  return has(onednn().get_effective_cpu_isa(), dnnl_cpu_isa_avx512_core);
}

void onednn_sgemm(const SgemmArguments& s) {
  const ThreadsInForce one_thread(1);
  const dnnl_status_t status =
      onednn().sgemm(s.transpose_a ? 'T' : 'N', s.transpose_b ? 'T' : 'N', s.m, s.n, s.k, s.alpha, s.a,
                     s.stride_a, s.b, s.stride_b, s.beta, s.c, s.stride_c);
  if (status != dnnl_success) throw Error("oneDNN refused an fp32 GEMM that it should support");
}

std::string_view onednn_bf16_path() {
  const std::string_view instructions = bf16_instructions();
  if (instructions == "avx512_core_amx") return "oneDNN bf16 (avx512_core_amx)";
  if (instructions == "avx512_core_bf16") return "oneDNN bf16 (avx512_core_bf16)";
  return {};
}

std::string onednn_library() {
  const dnnl_version_t* version = onednn().version();
  const std::string text = "oneDNN " + std::to_string(version->major) + "." + std::to_string(version->minor) +
                           "." + std::to_string(version->patch);
  const dnnl_cpu_isa_t isa = onednn().get_effective_cpu_isa();
  if (!bf16_instructions().empty()) return text + " (" + std::string(bf16_instructions()) + ")";
  if (has(isa, dnnl_cpu_isa_avx512_core)) return text + " (avx512_core)";
  return text + (has(isa, dnnl_cpu_isa_avx2) ? " (avx2)" : " (before avx2)");
}

}  // namespace tranche::kernels::cpu
