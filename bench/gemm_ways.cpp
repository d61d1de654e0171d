#include "bench/gemm_ways.h"

#include <cblas.h>
#include <omp.h>

#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>

namespace tranche::bench {

namespace {

/// Sets the number of threads of the libraries, which is global to the process, and restores the previous one
/// at destruction.
class ThreadsOfLibraries {
 public:
  explicit ThreadsOfLibraries(int threads)
      : openmp_(omp_get_max_threads()), openblas_(openblas_get_num_threads()) {
    omp_set_num_threads(threads);
    if (openblas_ != threads) openblas_set_num_threads(threads);
  }
  ~ThreadsOfLibraries() {
    omp_set_num_threads(openmp_);
    if (openblas_get_num_threads() != openblas_) openblas_set_num_threads(openblas_);
  }
  ThreadsOfLibraries(const ThreadsOfLibraries&) = delete;
  ThreadsOfLibraries& operator=(const ThreadsOfLibraries&) = delete;

 private:
  int openmp_, openblas_;
};

dnnl::memory::data_type type_of(DataType dtype) {
  return dtype == DataType::bfloat16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

struct Primitive {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  dnnl::matmul matmul;
  std::unordered_map<int, dnnl::memory> arguments;
};

/// oneDNN with a and b as stored, or converted beforehand to the layout that it prefers. Null if oneDNN has
/// no such GEMM.
std::shared_ptr<Primitive> primitive(GemmOperands& operands, bool packed_a, bool packed_b) {
  using memory = dnnl::memory;
  const kernels::Gemm& p = operands.gemm;
  auto made = std::make_shared<Primitive>();
  const memory::desc a({p.m, p.k}, type_of(p.dtype),
                       p.transpose_a ? memory::dims{1, p.m} : memory::dims{p.k, 1});
  const memory::desc b({p.k, p.n}, type_of(p.dtype),
                       p.transpose_b ? memory::dims{1, p.k} : memory::dims{p.n, 1});
  const memory::desc c({p.m, p.n}, type_of(p.c_dtype), memory::dims{p.n, 1});
  const memory::desc any_a({p.m, p.k}, type_of(p.dtype), memory::format_tag::any);
  const memory::desc any_b({p.k, p.n}, type_of(p.dtype), memory::format_tag::any);
  dnnl::primitive_attr attributes;
  if (p.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum();
    attributes.set_post_ops(sum);
  }
  const dnnl::matmul::primitive_desc description(
      dnnl::matmul::desc(packed_a ? any_a : a, packed_b ? any_b : b, c), attributes, made->engine, true);
  if (!description) return nullptr;
  made->matmul = dnnl::matmul(description);
  const auto laid_out = [&](const memory::desc& stored, void* data, const memory::desc& wanted) {
    memory from(stored, made->engine, data);
    if (stored == wanted) return from;
    memory to(wanted, made->engine);
    dnnl::reorder(from, to).execute(made->stream, from, to);
    made->stream.wait();
    return to;
  };
  made->arguments = {{DNNL_ARG_SRC, laid_out(a, operands.a.view().data, description.src_desc())},
                     {DNNL_ARG_WEIGHTS, laid_out(b, operands.b.view().data, description.weights_desc())},
                     {DNNL_ARG_DST, {c, made->engine, operands.c.view().data}}};
  return made;
}

void openblas(GemmOperands& operands) {
  const kernels::Gemm& p = operands.gemm;
  cblas_sgemm(CblasRowMajor, p.transpose_a ? CblasTrans : CblasNoTrans,
              p.transpose_b ? CblasTrans : CblasNoTrans, narrow<blasint>(p.m), narrow<blasint>(p.n),
              narrow<blasint>(p.k), 1.0f, operands.a.view().as<float>(),
              narrow<blasint>(p.transpose_a ? p.m : p.k), operands.b.view().as<float>(),
              narrow<blasint>(p.transpose_b ? p.k : p.n), p.accumulate ? 1.0f : 0.0f,
              operands.c.view().as<float>(), narrow<blasint>(p.n));
}

void onednn_sgemm(GemmOperands& operands) {
  const kernels::Gemm& p = operands.gemm;
  dnnl::sgemm(p.transpose_a ? 'T' : 'N', p.transpose_b ? 'T' : 'N', p.m, p.n, p.k, 1.0f,
              operands.a.view().as<float>(), p.transpose_a ? p.m : p.k, operands.b.view().as<float>(),
              p.transpose_b ? p.k : p.n, p.accumulate ? 1.0f : 0.0f, operands.c.view().as<float>(), p.n);
}

}  // namespace

std::vector<GemmWay> ways_of(const kernels::Gemm& gemm, int threads) {
  const auto operands = std::make_shared<GemmOperands>(gemm, threads);
  std::vector<GemmWay> ways{our_way(operands)};
  if (gemm.dtype == DataType::float16) return ways;
  const ThreadsOfLibraries in_force(threads);  // primitives are created for this number of threads
  const auto add = [&](std::string_view name, bool packed_a, bool packed_b) {
    if (const auto made = primitive(*operands, packed_a, packed_b)) {
      ways.push_back({name, [operands, made, threads] {
                        const ThreadsOfLibraries threads_of_run(threads);
                        made->matmul.execute(made->stream, made->arguments);
                        made->stream.wait();
                      }});
    }
  };
  add("onednn", false, false);
  add("onednn packed", false, true);
  add("onednn packed both", true, true);
  if (gemm.dtype == DataType::float32) {
    ways.push_back({"onednn sgemm", [operands, threads] {
                      const ThreadsOfLibraries threads_of_run(threads);
                      onednn_sgemm(*operands);
                    }});
    ways.push_back({"openblas", [operands, threads] {
                      const ThreadsOfLibraries threads_of_run(threads);
                      openblas(*operands);
                    }});
  }
  return ways;
}

}  // namespace tranche::bench
