// y = weight * x / sqrt(mean(x^2) + epsilon) over the last axis: x and y [rows, size], weight [size].

#include <cmath>
#include <cstdint>

extern "C" void normalize(const float* x, const float* weight, float* y, int64_t rows, int64_t size, double epsilon) {
  for (int64_t row = 0; row < rows; ++row, x += size, y += size) {
    float squares = 0;
    for (int64_t i = 0; i < size; ++i) squares += x[i] * x[i];
    const float factor = 1 / std::sqrt(squares / size + (float)epsilon);
    for (int64_t i = 0; i < size; ++i) y[i] = weight[i] * (x[i] * factor);
  }
}
