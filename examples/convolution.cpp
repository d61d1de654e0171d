// Two 3 x 3 convolutions by im2col and GEMM, on images that are divided in two ways. It runs alone, or as
//   mpirun -n 2 convolution tensor=2   by filters: a rank computes half of the channels between the two
//   mpirun -n 2 convolution shard=2    by space: a rank has half of the rows of each image
// The row next to a rank's own rows (the halo) comes from its neighbour. Both ways have the losses and
// weights of one rank up to rounding. Divided by filters, a rank holds half of the weights. Divided by space,
// it holds all of them, and ZeRO adds up the gradients of the ranks' rows.
#include <tranche/models/tensor_rows.h>
#include <tranche/tranche.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>
using namespace tranche;

using Numbers = std::vector<float>;
constexpr std::int64_t images = 4, side = 16, filters = 8, taps = 9;

TensorView view(Numbers& values, std::int64_t rows) {
  return {values.data(), DataType::float32, {rows, std::int64_t(values.size()) / rows}};
}

/// This rank's rows of each image, and its neighbours above and below.
class Space {
 public:
  explicit Space(Runtime& runtime) : ranks_(runtime.shard().split(0, runtime.shard().rank())) {}
  std::int64_t height() const { return side / ranks_->size(); }
  std::int64_t first() const { return height() * ranks_->rank(); }
  std::int64_t pixels() const { return images * height() * side; }

  /// x[images, height, side, channels] with one row added above and one below: the neighbours' rows, or zeros
  /// at a border.
  Numbers with_halo(const Numbers& x, std::int64_t channels) const {
    const std::int64_t row = side * channels, h = height();
    Numbers y(images * (h + 2) * row);
    for (std::int64_t i = 0; i < images; ++i)
      std::copy_n(&x[i * h * row], h * row, &y[(i * (h + 2) + 1) * row]);
    const auto place = [&](std::int64_t image, std::int64_t at) { return &y[(image * (h + 2) + at) * row]; };
    exchange(
        row, [&](std::int64_t i, bool up) { return place(i, up ? 1 : h); },
        [&](std::int64_t i, bool up, const float* got) { std::copy_n(got, row, place(i, up ? 0 : h + 1)); });
    return y;
  }

  /// The gradient of x, given that of with_halo(x): the gradient of a halo row is added to the row's source.
  Numbers of_halo(Numbers& d_y, std::int64_t channels) const {
    const std::int64_t row = side * channels, h = height();
    const auto place = [&](std::int64_t image, std::int64_t at) {
      return &d_y[(image * (h + 2) + at) * row];
    };
    exchange(
        row, [&](std::int64_t i, bool up) { return place(i, up ? 0 : h + 1); },
        [&](std::int64_t i, bool up, const float* got) {
          for (std::int64_t e = 0; e < row; ++e) place(i, up ? 1 : h)[e] += got[e];
        });
    Numbers d_x(images * h * row);
    for (std::int64_t i = 0; i < images; ++i) std::copy_n(place(i, 1), h * row, &d_x[i * h * row]);
    return d_x;
  }

 private:
  /// Sends a row of each image up and one down, and passes the received rows to `received`.
  template <class Sent, class Received>
  void exchange(std::int64_t row, const Sent& sent, const Received& received) const {
    const OperationLabel label{"convolution", "halo", Traffic::data, Tier::host};
    Numbers out[2], in(images * row);
    Event done[2];
    for (const bool up : {true, false}) {
      const int peer = ranks_->rank() + (up ? -1 : 1);
      if (peer < 0 || peer == ranks_->size()) continue;
      for (std::int64_t i = 0; i < images; ++i) out[up].insert(out[up].end(), sent(i, up), sent(i, up) + row);
      done[up] = ranks_->send(out[up].data(), images * row, DataType::float32, peer, {}, label);
    }
    for (const bool up : {true, false}) {
      const int peer = ranks_->rank() + (up ? -1 : 1);
      if (peer < 0 || peer == ranks_->size()) continue;
      ranks_->recv(in.data(), images * row, DataType::float32, peer, {}, label).wait();
      for (std::int64_t i = 0; i < images; ++i) received(i, up, &in[i * row]);
    }
    for (const Event& event : done) event.wait();
  }

  std::unique_ptr<Communicator> ranks_;
};

/// Calls visit(number in columns[pixels, taps, channels], number in x with halo) for each pixel's neighbours.
template <class Visit>
void for_each_tap(const Space& space, std::int64_t channels, const Visit& visit) {
  const std::int64_t h = space.height();
  std::int64_t column = 0;
  for (std::int64_t pixel = 0; pixel < space.pixels(); ++pixel) {
    const std::int64_t image = pixel / (h * side), y = pixel / side % h, x = pixel % side;
    for (std::int64_t tap = 0; tap < taps; ++tap) {
      const std::int64_t at = x + tap % 3 - 1;
      for (std::int64_t c = 0; c < channels; ++c, ++column) {
        if (at < 0 || at >= side) continue;
        visit(column, ((image * (h + 2) + y + tap / 3) * side + at) * channels + c);
      }
    }
  }
}

Numbers im2col(const Space& space, const Numbers& with_halo, std::int64_t channels) {
  Numbers columns(space.pixels() * taps * channels);
  for_each_tap(space, channels, [&](std::int64_t to, std::int64_t from) { columns[to] = with_halo[from]; });
  return columns;
}

void train(Runtime& runtime, std::optional<Engine>& made) {
  const Dimension whole{}, outputs{"filters"},
      inputs{"filters", taps};  // the inputs of each tap are cut separately
  ModelSpec spec;
  spec.tensor_dimensions = {"filters"};
  spec.tokens_per_sample = side * side;
  spec.add_unit({"network",
                 {{.name = "first",
                   .shape = {taps, filters},
                   .initializer = Initializer::normal(0.3f),
                   .dimensions = {whole, outputs}},
                  {.name = "first.bias",
                   .shape = {filters},
                   .initializer = Initializer::zeros(),
                   .dimensions = {outputs}},
                  {.name = "second",
                   .shape = {taps * filters, 1},
                   .initializer = Initializer::normal(0.1f),
                   .dimensions = {inputs, whole}},
                  {.name = "second.bias", .shape = {1}, .initializer = Initializer::zeros()}}});
  Engine& engine = made.emplace(runtime, spec, runtime.config());
  Stream& stream = engine.compute_stream();
  const Space space(runtime);
  const std::int64_t pixels = space.pixels();
  const models::Pass pass{.engine = engine,
                          .shape = {.width = 1},
                          .batch = pixels,
                          .time = 1,
                          .training = true,
                          .tensor = runtime.tensor()};
  const std::int64_t channels = pass.part_of(filters).count;  // channels that this rank computes
  // With the axis tensor a rank has some rows (pixels) of the sum over the ranks.
  const std::int64_t local = pass.local_rows(), first = pass.tensor_rank() * local;

  for (int step = 1; step <= 100; ++step) {
    const auto drawn = [&](std::int64_t image, std::int64_t y, std::int64_t x) {
      if (y < 0 || y >= side || x < 0 || x >= side) return 0.0f;
      return random_normal({.seed = 1}, ((step * images + image) * side + y) * side + x);
    };
    Numbers input(pixels), target(pixels);
    for (std::int64_t i = 0; i < pixels; ++i) {
      const std::int64_t image = i / side / space.height(), y = space.first() + i / side % space.height(),
                         x = i % side;
      input[i] = drawn(image, y, x);
      target[i] = std::sin(drawn(image, y - 1, x) + drawn(image, y, x + 1)) - input[i];
    }
    engine.begin_micro_batch();
    double loss = 0;
    {
      const GatheredUnit weights = engine.gather({0});
      Numbers first_columns = im2col(space, space.with_halo(input, 1), 1);
      Numbers sum(pixels * channels), active(sum), y(local), d_y(local);
      kernels::matmul_bias(stream, view(first_columns, pixels), weights.tensor(0), weights.tensor(1),
                           view(sum, pixels), engine.workspace());
      kernels::gelu_forward(stream, view(sum, pixels), view(active, pixels));
      Numbers second_columns = im2col(space, space.with_halo(active, channels), channels);
      models::PartialRows addends(pass, view(y, local));
      kernels::matmul(stream, {}, view(second_columns, pixels), weights.tensor(2), addends.view(),
                      engine.workspace());
      addends.scatter("second");
      kernels::add_bias(stream, view(y, local), weights.tensor(3));

      const models::GatheredRows all(pass, "outputs", view(y, local));
      for (std::int64_t i = 0; i < pixels; ++i) {
        const float error = all.view().as<float>()[i] - target[i];
        loss += 0.5 * error * error;
        if (i >= first && i < first + local) d_y[i - first] = error * engine.loss_gradient_scale();
      }
      const models::GatheredRows all_d_y(pass, "gradients of outputs", view(d_y, local));
      Numbers d_columns(second_columns.size()), d_active((space.height() + 2) * images * side * channels);
      kernels::matmul(stream, {.transpose_b = true}, all_d_y.view(), weights.tensor(2),
                      view(d_columns, pixels), engine.workspace());
      for_each_tap(space, channels,
                   [&](std::int64_t from, std::int64_t to) { d_active[to] += d_columns[from]; });
      Numbers d_sum = space.of_halo(d_active, channels);
      kernels::gelu_backward(stream, view(sum, pixels), view(d_sum, pixels), view(d_sum, pixels));

      UnitGradients gradients = engine.gradients({0});
      const kernels::MatmulOptions add{.transpose_a = true, .accumulate = true};
      kernels::matmul(stream, add, view(second_columns, pixels), all_d_y.view(), gradients.tensor(2),
                      engine.workspace());
      kernels::bias_gradient(stream, view(d_y, local), gradients.tensor(3));  // the whole bias gradient, for
                                                                              // this rank's rows
      kernels::matmul(stream, add, view(first_columns, pixels), view(d_sum, pixels), gradients.tensor(0),
                      engine.workspace());
      kernels::bias_gradient(stream, view(d_sum, pixels), gradients.tensor(1));
      std::move(gradients).reduce();
    }
    engine.end_micro_batch({&loss, DataType::float64, {}}, {&pixels, DataType::int64, {}});
    const StepResult result = engine.step();
    if (runtime.rank() == 0 && step % 20 == 0) std::printf("step %d loss %.9g\n", step, result.loss);
  }
  for (const char* name : {"first", "first.bias", "second", "second.bias"}) {
    const Numbers weight = engine.read_weight(name);
    if (runtime.rank() != 0) continue;
    std::printf("weights of %s", name);
    for (const float value : weight) std::printf(" %.9g", value);
    std::printf("\n");
  }
}

int main(int argc, char** argv) {
  Runtime runtime;
  std::optional<Engine> engine;  // outlives the try: peers hear of an error before the engine ends
  try {
    const std::string mesh = argc > 1 ? argv[1] : "";
    runtime = Runtime::from_config(R"({
      "train_batch_size": 4, "gradient_accumulation_steps": 1,
      "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
      "tranche": {"mesh": ")" + mesh +
                                   R"("}})");
    train(runtime, engine);
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
}
