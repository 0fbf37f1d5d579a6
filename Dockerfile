# syntax=docker/dockerfile:1
# docker build -t tidegate .
# docker run -p 8080:8080 tidegate
ARG RUST_VERSION=1.95

# Alpine's target is musl, so the binary is static.
FROM rust:${RUST_VERSION}-alpine AS build
# hadolint ignore=DL3018
RUN apk add --no-cache build-base ca-certificates
WORKDIR /src
COPY Cargo.toml Cargo.lock ./
COPY crates crates
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --profile dist --locked -p tidegate-server \
    && cp target/dist/tidegate /tidegate \
    && mkdir /names && ln -s /usr/bin/tidegate /names/ratelimit

# Nothing but the binary and the certificates of public CAs.
FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /tidegate /usr/bin/tidegate
# The command that Envoy Gateway starts: under this name, it takes the place of envoyproxy/ratelimit.
COPY --from=build /names/ /bin/
# The admin listener stays on loopback: set TIDEGATE_LISTEN_ADMIN and TIDEGATE_ADMIN_TOKEN_FILE to
# scrape metrics from other hosts.
ENV TIDEGATE_LISTEN_HTTP=0.0.0.0:8080 \
    TIDEGATE_LISTEN_GRPC=0.0.0.0:8081 \
    TIDEGATE_LISTEN=0.0.0.0:8000
EXPOSE 8000 8080 8081 8082
USER 65532:65532
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s CMD ["/usr/bin/tidegate", "health"]
ENTRYPOINT ["/usr/bin/tidegate"]
CMD ["serve"]
