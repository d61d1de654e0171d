#include "kernels/cpu/matmul_onednn.h"

#include <omp.h>

#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <tuple>
#include <unordered_map>

#include "tranche/core/error.h"

namespace tranche::kernels::cpu {

namespace {

bool has(dnnl::cpu_isa held, dnnl::cpu_isa wanted) {
  const auto bits = static_cast<unsigned>(wanted);
  return (static_cast<unsigned>(held) & bits) == bits;
}

/// Name of what multiplies bf16, empty when nothing in hardware does: oneDNN would emulate it on AVX-512,
/// slower than our own widening.
std::string_view bf16_instructions() {
  const dnnl::cpu_isa isa = dnnl::get_effective_cpu_isa();
  if (has(isa, dnnl::cpu_isa::avx512_core_amx)) return "avx512_core_amx";
  if (has(isa, dnnl::cpu_isa::avx512_core_bf16)) return "avx512_core_bf16";
  return {};
}

/// fp16 arithmetic beside bf16 marks the cores that were made with a matrix unit for bf16.
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
/// (issue 5717, still in 3.14). Both are rare in training and cheap to widen, so they are not handed over
/// anywhere, lest some CPUs run what others never test.
bool is_reliable(const MatmulCall& call) {
  constexpr std::int64_t tile_rows = 16, tile_depth = 32;
  return call.m >= tile_rows && call.n >= tile_rows && call.k % tile_depth == 0;
}

/// oneDNN takes the number of threads from the calling thread's OpenMP setting, both when it makes a
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
  dnnl::matmul primitive;
  dnnl::memory::desc a, b, c, scratchpad;
  std::int64_t scratchpad_bytes = 0;
  bool exists = false;
};

/// Primitives made by one thread; making one costs far more than finding it again.
class Primitives {
 public:
  const Prepared& find(const MatmulCall& call) {
    const Key key{call.transpose_a, call.transpose_b, call.accumulate, call.c_dtype == DataType::float32,
                  call.m,           call.n,           call.k,          call.threads};
    if (const auto found = prepared_.find(key); found != prepared_.end()) return found->second;
    if (prepared_.size() >= most_primitives) prepared_.clear();
    return prepared_.emplace(key, prepare(call)).first->second;
  }
  dnnl::engine& engine() { return engine_; }
  dnnl::stream& stream() { return stream_; }

 private:
  static constexpr std::size_t most_primitives = 1024;

  Prepared prepare(const MatmulCall& call) {
    using memory = dnnl::memory;
    const auto c_type = call.c_dtype == DataType::float32 ? memory::data_type::f32 : memory::data_type::bf16;
    Prepared made;
    made.a = {{call.m, call.k},
              memory::data_type::bf16,
              call.transpose_a ? memory::dims{1, call.m} : memory::dims{call.k, 1}};
    made.b = {{call.k, call.n},
              memory::data_type::bf16,
              call.transpose_b ? memory::dims{1, call.k} : memory::dims{call.n, 1}};
    made.c = {{call.m, call.n}, c_type, memory::dims{call.n, 1}};
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (call.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum();
      attributes.set_post_ops(sum);
    }
    const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(made.a, made.b, made.c), attributes,
                                                   engine_, true);
    if (!description) return made;
    made.scratchpad = description.scratchpad_desc();
    made.scratchpad_bytes = static_cast<std::int64_t>(made.scratchpad.get_size());
    made.primitive = dnnl::matmul(description);
    made.exists = true;
    return made;
  }

  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::map<Key, Prepared> prepared_;
};

}  // namespace

bool onednn_matmul(const MatmulCall& call) {
  if (bf16_instructions().empty() || !is_reliable(call)) return false;
  thread_local Primitives primitives;
  const ThreadsInForce threads(call.threads);
  const Prepared& prepared = primitives.find(call);
  if (!prepared.exists || prepared.scratchpad_bytes > call.workspace.bytes) return false;
  dnnl::engine& engine = primitives.engine();
  const std::unordered_map<int, dnnl::memory> arguments{
      {DNNL_ARG_SRC, {prepared.a, engine, const_cast<void*>(call.a)}},
      {DNNL_ARG_WEIGHTS, {prepared.b, engine, const_cast<void*>(call.b)}},
      {DNNL_ARG_DST, {prepared.c, engine, call.c}},
      {DNNL_ARG_SCRATCHPAD, {prepared.scratchpad, engine, call.workspace.data}}};
  prepared.primitive.execute(primitives.stream(), arguments);
  primitives.stream().wait();
  return true;
}

bool onednn_bf16_is_fast() {
  const std::string_view instructions = bf16_instructions();
  return instructions == "avx512_core_amx" || (!instructions.empty() && !made_with_matrix_unit());
}

bool onednn_has_sgemm() {
  return has(dnnl::get_effective_cpu_isa(), dnnl::cpu_isa::avx2);
}

bool onednn_has_wide_sgemm() {
  return has(dnnl::get_effective_cpu_isa(), dnnl::cpu_isa::avx512_core);
}

void onednn_sgemm(const SgemmArguments& s) {
  const ThreadsInForce one_thread(1);
  const dnnl::status status = dnnl::sgemm(s.transpose_a ? 'T' : 'N', s.transpose_b ? 'T' : 'N', s.m, s.n, s.k,
                                          s.alpha, s.a, s.stride_a, s.b, s.stride_b, s.beta, s.c, s.stride_c);
  if (status != dnnl::status::success) throw Error("oneDNN refused an fp32 GEMM that it should have");
}

std::string_view onednn_bf16_path() {
  const std::string_view instructions = bf16_instructions();
  if (instructions == "avx512_core_amx") return "oneDNN bf16 (avx512_core_amx)";
  if (instructions == "avx512_core_bf16") return "oneDNN bf16 (avx512_core_bf16)";
  return {};
}

std::string onednn_library() {
  const dnnl_version_t* version = dnnl_version();
  const std::string text = "oneDNN " + std::to_string(version->major) + "." + std::to_string(version->minor) +
                           "." + std::to_string(version->patch);
  const dnnl::cpu_isa isa = dnnl::get_effective_cpu_isa();
  if (!bf16_instructions().empty()) return text + " (" + std::string(bf16_instructions()) + ")";
  if (has(isa, dnnl::cpu_isa::avx512_core)) return text + " (avx512_core)";
  return text + (has(isa, dnnl::cpu_isa::avx2) ? " (avx2)" : " (before avx2)");
}

}  // namespace tranche::kernels::cpu
