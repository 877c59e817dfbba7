# modelmill on a CPU:  docker build -f docker/cpu.Dockerfile -t modelmill:cpu .
# The wheel is built with a compiler, so that the image of the server needs none.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps -w /wheels .

FROM python:3.12-slim
RUN useradd --create-home --uid 10001 modelmill
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu \
    && grep -vE '^(torch|triton)==' /tmp/constraints.txt > /tmp/rest.txt \
    && pip install --no-cache-dir -c /tmp/rest.txt "$(ls /wheels/*.whl)[serve]" \
    && rm -rf /wheels /tmp/constraints.txt /tmp/rest.txt
USER 10001
# a volume takes the owner of the folder that the image has in its place; without it, root
RUN mkdir /home/modelmill/cache
ENV MODELMILL_CACHE=/home/modelmill/cache
VOLUME ["/engines", "/home/modelmill/cache"]
EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=10s --timeout=3s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["modelmill"]
CMD ["serve", "--help"]
