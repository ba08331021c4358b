# The environment in a container: targets train, tensorboard and jupyter, which share one layer of packages.
#   docker build --target train -t timm-parallel . && docker run --rm --shm-size 8g timm-parallel python train.py debug=fast
# There is no SSH server: `docker exec -it <container> bash` opens a shell in one that runs, without keys, ports or a
# second process to look after.
ARG BASE=python:3.11-slim
FROM ${BASE} AS packages
# torch.compile calls a C compiler on a GPU.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# Home and project are everybody's: `--user $(id -u)` then writes outputs that belong to whoever started it.
RUN python3 -m venv /opt/venv && mkdir -p /home/user/project && useradd --uid 1000 --home /home/user user \
    && chown user /home/user/project && chmod 1777 /home/user /home/user/project
ENV PATH=/opt/venv/bin:$PATH HOME=/home/user PYTHONUNBUFFERED=1
WORKDIR /home/user/project
COPY requirements.lock .
RUN pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements.lock

FROM packages AS train
COPY --chown=1000:1000 . .
USER 1000
CMD ["python", "train.py"]

# On loopback, which a container shares with nobody; compose.yaml opens it, and publishes the port on the host's loopback.
FROM train AS tensorboard
CMD ["tensorboard", "--logdir", "outputs", "--port", "6006"]

FROM packages AS jupyter
COPY requirements.txt requirements-notebook.txt ./
RUN pip install --no-cache-dir --disable-pip-version-check -r requirements-notebook.txt
COPY --chown=1000:1000 . .
USER 1000
CMD ["jupyter", "lab", "--no-browser", "--port", "8888", "notebooks"]
