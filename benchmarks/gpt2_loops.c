/* A training step of GPT-2 as plain loop nests: the peer of `gru-ref bench gpt-124m`.
 *
 * This is what a C programmer writes from the equations (gru_ref/ops and gru_ref/models/gpt2.py) without a
 * BLAS or intrinsics: a loop an index, `omp parallel for` on the outermost, the rest left to the compiler. One
 * kindness: products take ROWS rows at a time, so that a weight is used while it is in the cache; else the
 * classifier, 155 MB, would be read from memory for every token. It is not part of the package and has no use
 * beside the comparison.
 *
 * Arrays are fp32 and row-major. Rows n = b·T + t run through the batch, each of C channels:
 *
 *     x (N, C)   qkv (N, 3C): q, k and v, each of H heads of D = C/H   att (B, H, T, T)   logits (N, V)
 *
 * Parameters lie in one vector, in the order of gru_ref.models.parameter_shapes: embedding (V, C), position
 * (S, C), then of each layer ln_1, qkv, proj, ln_2, fc, proj2 with weight and bias, then ln_f. The classifier
 * is the embedding. Gradients lie likewise.
 */

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 8

enum { LN1W, LN1B, QKVW, QKVB, PROJW, PROJB, LN2W, LN2B, FCW, FCB, PROJ2W, PROJ2B, PER_LAYER };

typedef struct {
    int L, C, H, S, V, B, T;
} Shape;

typedef struct { /* of one layer, kept from forward to backward */
    float *x, *mean1, *rstd1, *norm1, *qkv, *att, *y, *x2, *mean2, *rstd2, *norm2, *fc, *gelu;
} Layer;

typedef struct {
    Shape s;
    size_t count; /* of parameters */
    float *params, *grads, *m, *v;
    Layer *layers;
    float *x, *mean, *rstd, *norm, *probs; /* after the last layer; probs (N, V), then dlogits */
    float *dx, *dnorm, *dbig, *dqkv, *dy;  /* dbig (N, 4C), the others (N, C) but for dqkv */
} Model;

static float *floats(size_t n) {
    return calloc(n, sizeof(float));
}

static void sizes_of_layer(const Shape *s, size_t n[PER_LAYER]) {
    size_t C = s->C;
    n[LN1W] = n[LN1B] = n[LN2W] = n[LN2B] = n[PROJB] = n[PROJ2B] = C;
    n[QKVW] = 3 * C * C, n[QKVB] = 3 * C, n[PROJW] = C * C;
    n[FCW] = n[PROJ2W] = 4 * C * C, n[FCB] = 4 * C;
}

/* Where tensor `kind` of layer l begins; PER_LAYER of it is the end of the layer. */
static size_t at(const Shape *s, int l, int kind) {
    size_t n[PER_LAYER], offset = (size_t)(s->V + s->S) * s->C, layer = 0;
    sizes_of_layer(s, n);
    for (int i = 0; i < PER_LAYER; i++) layer += n[i];
    for (int i = 0; i < kind; i++) offset += n[i];
    return offset + (size_t)l * layer;
}

Model *gpt2_new(int L, int C, int H, int S, int V, int B, int T, int threads) {
    omp_set_num_threads(threads);
    Model *g = calloc(1, sizeof(Model));
    g->s = (Shape){L, C, H, S, V, B, T};
    size_t N = (size_t)B * T, NC = N * C;
    g->count = at(&g->s, L, 0) + 2 * (size_t)C;
    g->params = floats(g->count), g->grads = floats(g->count);
    g->m = floats(g->count), g->v = floats(g->count);
    g->layers = calloc(L, sizeof(Layer));
    for (int l = 0; l < L; l++)
        g->layers[l] = (Layer){floats(NC),     floats(N),  floats(N),  floats(NC), floats(3 * NC),
                               floats((size_t)B * H * T * T), floats(NC), floats(NC), floats(N),
                               floats(N),      floats(NC), floats(4 * NC), floats(4 * NC)};
    g->x = floats(NC), g->mean = floats(N), g->rstd = floats(N), g->norm = floats(NC);
    g->probs = floats(N * V);
    g->dx = floats(NC), g->dnorm = floats(NC), g->dbig = floats(4 * NC), g->dqkv = floats(3 * NC);
    g->dy = floats(NC);
    return g;
}

float *gpt2_params(Model *g) { return g->params; }
float *gpt2_grads(Model *g) { return g->grads; }

/* out (N, O) = x (N, I) · w (O, I)ᵀ + b (O) or no b */
static void linear(float *out, const float *x, const float *w, const float *b, int N, int I, int O) {
    #pragma omp parallel for
    for (int first = 0; first < N; first += ROWS)
        for (int o = 0; o < O; o++)
            for (int n = first; n < first + ROWS && n < N; n++) {
                const float *xn = x + (size_t)n * I, *wo = w + (size_t)o * I;
                float sum = b ? b[o] : 0;
                for (int i = 0; i < I; i++) sum += xn[i] * wo[i];
                out[(size_t)n * O + o] = sum;
            }
}

/* dx (N, I) = dout (N, O) · w;  dw (O, I) += doutᵀ · x;  db (O) += Σ_n dout */
static void linear_backward(float *dx, float *dw, float *db, const float *dout, const float *x,
                            const float *w, int N, int I, int O) {
    memset(dx, 0, (size_t)N * I * sizeof(float));
    #pragma omp parallel for
    for (int first = 0; first < N; first += ROWS)
        for (int o = 0; o < O; o++)
            for (int n = first; n < first + ROWS && n < N; n++) {
                float *dxn = dx + (size_t)n * I, d = dout[(size_t)n * O + o];
                const float *wo = w + (size_t)o * I;
                for (int i = 0; i < I; i++) dxn[i] += d * wo[i];
            }
    #pragma omp parallel for
    for (int o = 0; o < O; o++) {
        float *dwo = dw + (size_t)o * I, sum = 0;
        for (int n = 0; n < N; n++) {
            const float *xn = x + (size_t)n * I;
            float d = dout[(size_t)n * O + o];
            sum += d;
            for (int i = 0; i < I; i++) dwo[i] += d * xn[i];
        }
        if (db) db[o] += sum;
    }
}

static void norm(float *out, float *mean, float *rstd, const float *x, const float *w, const float *b, int N,
                 int C) {
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float *xn = x + (size_t)n * C;
        float mu = 0, var = 0;
        for (int c = 0; c < C; c++) mu += xn[c];
        mu /= C;
        for (int c = 0; c < C; c++) var += (xn[c] - mu) * (xn[c] - mu);
        mean[n] = mu;
        rstd[n] = 1 / sqrtf(var / C + 1e-5f);
        for (int c = 0; c < C; c++) out[(size_t)n * C + c] = (xn[c] - mu) * rstd[n] * w[c] + b[c];
    }
}

/* dx += the gradient of x; dx may not be dout */
static void norm_backward(float *dx, float *dw, float *db, const float *dout, const float *x,
                          const float *mean, const float *rstd, const float *w, int N, int C) {
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float *xn = x + (size_t)n * C, *dn = dout + (size_t)n * C;
        float mean1 = 0, mean2 = 0;
        for (int c = 0; c < C; c++) {
            float d = dn[c] * w[c];
            mean1 += d;
            mean2 += d * (xn[c] - mean[n]) * rstd[n];
        }
        mean1 /= C, mean2 /= C;
        for (int c = 0; c < C; c++)
            dx[(size_t)n * C + c] += rstd[n] * (dn[c] * w[c] - mean1 - (xn[c] - mean[n]) * rstd[n] * mean2);
    }
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            float d = dout[(size_t)n * C + c];
            db[c] += d;
            dw[c] += d * (x[(size_t)n * C + c] - mean[n]) * rstd[n];
        }
}

/* y_i = Σ_j p_ij v_j over j ≤ i, p = softmax(q·k/√D); att holds p */
static void attention(float *y, float *att, const float *qkv, const Shape *s) {
    int T = s->T, C = s->C, H = s->H, D = C / H;
    float scale = 1 / sqrtf(D);
    #pragma omp parallel for collapse(2)
    for (int b = 0; b < s->B; b++)
        for (int h = 0; h < H; h++)
            for (int i = 0; i < T; i++) {
                const float *rows = qkv + (size_t)b * T * 3 * C + h * D, *q = rows + (size_t)i * 3 * C;
                float *p = att + (((size_t)b * H + h) * T + i) * T, top = -1e30f, total = 0;
                float *out = y + ((size_t)b * T + i) * C + h * D;
                for (int j = 0; j <= i; j++) {
                    const float *k = rows + (size_t)j * 3 * C + C;
                    float score = 0;
                    for (int d = 0; d < D; d++) score += q[d] * k[d];
                    p[j] = score * scale;
                    if (p[j] > top) top = p[j];
                }
                for (int j = 0; j <= i; j++) total += p[j] = expf(p[j] - top);
                for (int d = 0; d < D; d++) out[d] = 0;
                for (int j = 0; j <= i; j++) {
                    const float *v = rows + (size_t)j * 3 * C + 2 * C;
                    p[j] /= total;
                    for (int d = 0; d < D; d++) out[d] += p[j] * v[d];
                }
            }
}

static void attention_backward(float *dqkv, const float *dy, const float *att, const float *qkv,
                               const Shape *s) {
    int T = s->T, C = s->C, H = s->H, D = C / H;
    float scale = 1 / sqrtf(D);
    memset(dqkv, 0, (size_t)s->B * T * 3 * C * sizeof(float));
    #pragma omp parallel for collapse(2)
    for (int b = 0; b < s->B; b++)
        for (int h = 0; h < H; h++) {
            float dp[T];
            for (int i = 0; i < T; i++) {
                size_t first = (size_t)b * T * 3 * C + h * D, row = first + (size_t)i * 3 * C;
                const float *p = att + (((size_t)b * H + h) * T + i) * T;
                const float *d = dy + ((size_t)b * T + i) * C + h * D;
                float delta = 0;
                for (int j = 0; j <= i; j++) {
                    size_t v = first + (size_t)j * 3 * C + 2 * C;
                    float sum = 0;
                    for (int e = 0; e < D; e++) {
                        sum += d[e] * qkv[v + e];
                        dqkv[v + e] += p[j] * d[e];
                    }
                    dp[j] = sum;
                    delta += p[j] * sum;
                }
                for (int j = 0; j <= i; j++) {
                    size_t k = first + (size_t)j * 3 * C + C;
                    float ds = p[j] * (dp[j] - delta) * scale;
                    for (int e = 0; e < D; e++) {
                        dqkv[row + e] += ds * qkv[k + e];
                        dqkv[k + e] += ds * qkv[row + e];
                    }
                }
            }
        }
}

static void gelu(float *out, const float *x, size_t n) {
    #pragma omp parallel for
    for (size_t i = 0; i < n; i++)
        out[i] = x[i] * (1 + tanhf(0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i]))) / 2;
}

/* d of the result in, d of x out */
static void gelu_backward(float *d, const float *x, size_t n) {
    #pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        float t = tanhf(0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i]));
        float slope = (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * x[i] * x[i]);
        d[i] *= (1 + t + x[i] * slope) / 2;
    }
}

static void add(float *out, const float *a, const float *b, size_t n) {
    #pragma omp parallel for
    for (size_t i = 0; i < n; i++) out[i] = a[i] + b[i];
}

static void forward(Model *g, const int *ids) {
    const Shape *s = &g->s;
    int N = s->B * s->T, C = s->C;
    size_t NC = (size_t)N * C;
    const float *p = g->params, *position = p + (size_t)s->V * C;
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++)
            g->layers[0].x[(size_t)n * C + c] = p[(size_t)ids[n] * C + c] + position[(size_t)(n % s->T) * C + c];
    for (int l = 0; l < s->L; l++) {
        Layer *a = &g->layers[l];
        float *next = l + 1 < s->L ? g->layers[l + 1].x : g->x;
        norm(a->norm1, a->mean1, a->rstd1, a->x, p + at(s, l, LN1W), p + at(s, l, LN1B), N, C);
        linear(a->qkv, a->norm1, p + at(s, l, QKVW), p + at(s, l, QKVB), N, C, 3 * C);
        attention(a->y, a->att, a->qkv, s);
        linear(a->x2, a->y, p + at(s, l, PROJW), p + at(s, l, PROJB), N, C, C);
        add(a->x2, a->x2, a->x, NC);
        norm(a->norm2, a->mean2, a->rstd2, a->x2, p + at(s, l, LN2W), p + at(s, l, LN2B), N, C);
        linear(a->fc, a->norm2, p + at(s, l, FCW), p + at(s, l, FCB), N, C, 4 * C);
        gelu(a->gelu, a->fc, 4 * NC);
        linear(next, a->gelu, p + at(s, l, PROJ2W), p + at(s, l, PROJ2B), N, 4 * C, C);
        add(next, next, a->x2, NC);
    }
    norm(g->norm, g->mean, g->rstd, g->x, p + at(s, s->L, 0), p + at(s, s->L, 0) + C, N, C);
    linear(g->probs, g->norm, p, NULL, N, C, s->V);
}

/* The mean loss; probs, the logits so far, become the gradient of it by them. */
static double loss_and_dlogits(Model *g, const int *targets) {
    int N = g->s.B * g->s.T, V = g->s.V;
    double loss = 0;
    #pragma omp parallel for reduction(+ : loss)
    for (int n = 0; n < N; n++) {
        float *z = g->probs + (size_t)n * V, top = -1e30f, total = 0;
        for (int i = 0; i < V; i++)
            if (z[i] > top) top = z[i];
        loss += top - z[targets[n]];
        for (int i = 0; i < V; i++) total += z[i] = expf(z[i] - top);
        loss += logf(total);
        for (int i = 0; i < V; i++) z[i] /= total * N;
        z[targets[n]] -= 1.0f / N;
    }
    return loss / N;
}

static void backward(Model *g, const int *ids) {
    const Shape *s = &g->s;
    int N = s->B * s->T, C = s->C, L = s->L;
    size_t NC = (size_t)N * C, last = at(s, L, 0);
    float *p = g->params, *d = g->grads;
    memset(d, 0, g->count * sizeof(float));
    memset(g->dx, 0, NC * sizeof(float));
    linear_backward(g->dnorm, d, NULL, g->probs, g->norm, p, N, C, s->V);
    norm_backward(g->dx, d + last, d + last + C, g->dnorm, g->x, g->mean, g->rstd, p + last, N, C);
    for (int l = L - 1; l >= 0; l--) {
        Layer *a = &g->layers[l];
        linear_backward(g->dbig, d + at(s, l, PROJ2W), d + at(s, l, PROJ2B), g->dx, a->gelu,
                        p + at(s, l, PROJ2W), N, 4 * C, C);
        gelu_backward(g->dbig, a->fc, 4 * NC);
        linear_backward(g->dnorm, d + at(s, l, FCW), d + at(s, l, FCB), g->dbig, a->norm2,
                        p + at(s, l, FCW), N, C, 4 * C);
        norm_backward(g->dx, d + at(s, l, LN2W), d + at(s, l, LN2B), g->dnorm, a->x2, a->mean2, a->rstd2,
                      p + at(s, l, LN2W), N, C);
        linear_backward(g->dy, d + at(s, l, PROJW), d + at(s, l, PROJB), g->dx, a->y, p + at(s, l, PROJW),
                        N, C, C);
        attention_backward(g->dqkv, g->dy, a->att, a->qkv, s);
        linear_backward(g->dnorm, d + at(s, l, QKVW), d + at(s, l, QKVB), g->dqkv, a->norm1,
                        p + at(s, l, QKVW), N, C, 3 * C);
        norm_backward(g->dx, d + at(s, l, LN1W), d + at(s, l, LN1B), g->dnorm, a->x, a->mean1, a->rstd1,
                      p + at(s, l, LN1W), N, C);
    }
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            d[(size_t)ids[n] * C + c] += g->dx[(size_t)n * C + c];
            d[(size_t)(s->V + n % s->T) * C + c] += g->dx[(size_t)n * C + c];
        }
}

/* Forward and backward over ids and targets (B, T): the mean loss; the gradients are in gpt2_grads. */
double gpt2_gradients(Model *g, const int *ids, const int *targets) {
    forward(g, ids);
    double loss = loss_and_dlogits(g, targets);
    backward(g, ids);
    return loss;
}

static void adamw(Model *g, size_t start, size_t count, float factor, float decay, int t, float lr) {
    const float b1 = 0.9f, b2 = 0.999f, eps = 1e-8f;
    float c1 = 1 - powf(b1, t), c2 = 1 - powf(b2, t);
    #pragma omp parallel for
    for (size_t i = start; i < start + count; i++) {
        float d = g->grads[i] * factor;
        g->m[i] = b1 * g->m[i] + (1 - b1) * d;
        g->v[i] = b2 * g->v[i] + (1 - b2) * d * d;
        g->params[i] -= lr * (g->m[i] / c1 / (sqrtf(g->v[i] / c2) + eps) + decay * g->params[i]);
    }
}

/* Clip by the global norm and update; only matrices decay. */
void gpt2_update(Model *g, int t, float lr, float decay, float max_norm) {
    const Shape *s = &g->s;
    double square = 0;
    #pragma omp parallel for reduction(+ : square)
    for (size_t i = 0; i < g->count; i++) square += g->grads[i] * g->grads[i];
    float factor = sqrt(square) > max_norm ? max_norm / sqrt(square) : 1;
    adamw(g, 0, at(s, 0, 0), factor, decay, t, lr);
    for (int l = 0; l < s->L; l++)
        for (int kind = 0; kind < PER_LAYER; kind++) {
            int matrix = kind == QKVW || kind == PROJW || kind == FCW || kind == PROJ2W;
            size_t start = at(s, l, kind), end = at(s, l, kind + 1);
            adamw(g, start, end - start, factor, matrix ? decay : 0, t, lr);
        }
    adamw(g, at(s, s->L, 0), 2 * (size_t)s->C, factor, 0, t, lr);
}
